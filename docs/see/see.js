// Steps through the recorded runs of runs.js. A frame says what each rank does at one moment.

const COLORS = ["var(--rank0)", "var(--rank1)", "var(--rank2)", "var(--rank3)"];
const $ = (id) => document.getElementById(id);
const state = { scene: Object.keys(SCENES)[0], option: null, frame: 0, language: "en" };

function make(tag, parent, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  parent?.append(element);
  return element;
}

// Text in the language of the reader: texts are [English, Chinese].
const say = (texts) => texts[state.language === "zh" ? 1 : 0];

const scene = () => SCENES[state.scene];
const runs = () => RUNS[state.scene];
const run = () => runs()[state.option];

// Return the values of a rank at a frame: a frame holds only those that have changed.
function valuesAt(rank, frame) {
  let values = {};
  for (let k = 0; k <= frame; k++) {
    const one = run().frames[k].ranks[rank];
    if (one.fresh) values = {}; // another function or process: it has nothing of the one before
    Object.assign(values, one.values);
  }
  return values;
}

// What a rank does, in words.

const DOES = {
  done: ["gets the result", "得到结果"],
  end: ["leaves this block", "离开这个代码块"],
  started: ["starts", "启动"],
  restarted: ["starts", "启动"],
  killed: ["is killed", "被杀死"],
  gone: ["is gone", "已不在"],
  failed: ["fails", "出错"],
  return: ["returns", "返回"],
  line: ["comes to the marked line", "即将执行标出的这一行"],
  ended: ["has ended", "已结束"],
};

function callName(call) {
  const [name, ...numbers] = call.split(" ");
  if (scene().names?.[name]) return say(scene().names[name]);
  if (name !== "message") return `${name} ${numbers.join(" ")}`;
  return say([`message ${numbers[2]} of rank ${numbers[0]}`, `rank ${numbers[0]} 的第 ${numbers[2]} 条消息`]);
}

function describe(rank, one, stands) {
  const calls = (one.calls ?? []).map(callName).join(", ");
  const of = [one.of ?? []].flat().map((name) => say(scene().names[name])).join(", ");
  switch (one.kind) {
    case "wait":
    case "receive":
      if (stands) return say([`stands still in ${calls}`, `卡在 ${calls}`]);
      if (one.kind === "receive") return say([`waits for ${calls}`, `等待 ${calls}`]);
      return say([`waits in ${calls}`, `在 ${calls} 中等待`]);
    case "send":
      return say([`sends ${one.sent} to rank ${one.to}`, `向 rank ${one.to} 发送 ${one.sent}`]);
    case "compute":
      return say([`computes ${of}`, `计算 ${of}`]);
    case "gradient":
      return say([`computes the gradient of ${of}`, `算出 ${of} 的梯度`]);
    case "bucket":
      return say([`starts ${calls}: the bucket of ${of} is full`, `启动 ${calls}：${of}的 bucket 已满`]);
  }
  return say(DOES[one.kind]);
}

// The notes of a frame: those of its events and of the lines that its ranks are at.
function notesOf(frame) {
  const lines = run().program.split("\n");
  const found = new Map(); // {note: its ranks}
  frame.ranks.forEach((one, rank) => {
    const line = one.line ? lines[one.line - 1] : "";
    const place = [line, one.calls ?? [], one.of ?? []].flat().join(" ");
    const key = frame.hang ? "hang" : one.kind;
    const fits = (where) => { // "@wait barrier": an event, and words of its line or calls; else text of a line
      if (!where.startsWith("@")) return one.kind === "line" && line.includes(where);
      const [kind, ...text] = where.slice(1).split(" ");
      return kind === key && text.every((word) => place.includes(word));
    };
    const note = scene().notes.find(([where, , , option]) => fits(where) && (!option || option === state.option));
    if (note) found.set(say([note[1], note[2]]), [...(found.get(say([note[1], note[2]])) ?? []), rank]);
  });
  if (found.size < 2) return [...found.keys()];
  return [...found].map(([note, ranks]) => `${say(["Rank", "rank"])} ${ranks.join(", ")}${say([": ", "："])}${note}`);
}

// Drawing

function drawValue(parent, label, value, isNew, limit) {
  const box = make("div", parent, { className: isNew ? "value new" : "value" });
  make("span", box, { textContent: `${say(scene().labels[label] ?? [label, label])} ` });
  if (limit) {
    make("span", box, { textContent: `${value} / ${limit}` });
    const bar = make("div", box, { className: "bar" });
    make("div", bar).style.width = `${Math.min(100, (100 * value) / limit)}%`;
    return;
  }
  const rows = Array.isArray(value) ? (Array.isArray(value[0]) ? value : [value]) : [[value]];
  const most = Math.max(1e-9, ...rows.flat().map((number) => Math.abs(number)));
  const grid = make("div", box, { className: "grid" });
  grid.style.gridTemplateColumns = `repeat(${Math.max(1, rows[0].length)}, auto)`;
  for (const number of rows.flat()) {
    const cell = make("div", grid, { className: "cell", textContent: number });
    cell.style.background = `rgba(var(${number < 0 ? "--minus" : "--plus"}), ${(0.4 * Math.abs(number)) / most})`;
  }
}

function drawLanes() {
  const frame = run().frames[state.frame];
  $("lanes").replaceChildren();
  frame.ranks.forEach((one, rank) => {
    const waits = one.kind === "wait" || one.kind === "receive";
    const lane = make("div", $("lanes"), { className: waits ? "lane waits" : `lane ${one.kind}` });
    lane.style.setProperty("--color", COLORS[rank]);
    const heading = make("h3", lane, { textContent: `rank ${rank} ` });
    if ("ms" in one) make("small", heading, { textContent: `${one.ms} ms` });
    make("p", lane, { className: "does", textContent: describe(rank, one, frame.hang) });
    const values = one.kind === "gone" ? {} : valuesAt(rank, state.frame);
    for (const label of scene().watch) {
      if (values[label] != null) {
        drawValue(lane, label, values[label], label in (one.values ?? {}), scene().bars?.[label]);
      }
    }
  });
}

function drawCode() {
  const frame = run().frames[state.frame];
  const own = run().program.split("\n");
  const first = Object.values(runs())[0].program.split("\n");
  $("code").replaceChildren();
  const begin = own.findIndex((line) => line.startsWith(`def ${scene().functions[0]}`) || line.startsWith("class "));
  const main = own.findIndex((line, index) => index > begin && line.startsWith("if __name__"));
  own.slice(0, main < 0 ? own.length : main - 2).forEach((text, index) => {
    if (index < begin) return;
    const here = frame.ranks.flatMap((one, rank) => (one.line === index + 1 ? [rank] : []));
    const item = make("li", $("code"), { className: here.length ? "here" : "" });
    if (!first.includes(text)) item.classList.add("changed");
    const gutter = make("i", item);
    for (const rank of here) make("b", gutter, { textContent: rank }).style.background = COLORS[rank];
    make("span", item, { textContent: text || " " });
  });
  const marked = $("code").querySelector(".here"); // the panel may be lower than the program
  if (marked) $("code").scrollTop = marked.offsetTop - $("code").offsetTop - 60;
}

function drawNote() {
  const frame = run().frames[state.frame];
  $("note").className = frame.hang ? "hang" : "";
  let notes = [];
  for (let k = state.frame; k >= 0 && !notes.length; k--) notes = notesOf(run().frames[k]);
  $("note").textContent = notes.join("\n"); // a frame without a note keeps that of the frame before
  if (frame.hang && run().says) make("pre", $("note"), { textContent: run().says });
}

function draw() {
  const frames = run().frames;
  state.frame = Math.max(0, Math.min(state.frame, frames.length - 1));
  $("slider").max = frames.length - 1;
  $("slider").value = state.frame;
  $("place").textContent = `${state.frame + 1} / ${frames.length}`;
  for (const id of ["first", "back"]) $(id).disabled = state.frame === 0;
  for (const id of ["next", "last"]) $(id).disabled = state.frame === frames.length - 1;
  drawNote();
  drawCode();
  drawLanes();
  history.replaceState(null, "", `#${[state.scene, state.option, state.frame, state.language].join("/")}`);
}

function drawPage() {
  document.documentElement.lang = state.language === "zh" ? "zh-CN" : "en";
  document.title = $("title").textContent = say(PAGE.title);
  $("intro").textContent = say(PAGE.intro);
  $("language").textContent = state.language === "zh" ? "English" : "中文";
  $("scenes").replaceChildren();
  for (const [name, one] of Object.entries(SCENES)) {
    const button = make("button", $("scenes"), { type: "button", textContent: say(one.title) });
    button.setAttribute("aria-pressed", name === state.scene);
    button.onclick = () => show(name);
  }
  $("question").textContent = say(scene().questions?.[state.option] ?? scene().question);
  $("about").textContent = say(scene().about);
  $("switches").replaceChildren();
  const options = Object.keys(runs());
  for (const option of options.length > 1 ? options : []) {
    const button = make("button", $("switches"), { type: "button", textContent: say(scene().options[option]) });
    button.setAttribute("aria-pressed", option === state.option);
    button.onclick = () => show(state.scene, option);
  }
  $("run").textContent = scene().run ? `${say(PAGE.run)} ${scene().run} ${scene().flags}` : "";
  drawCalculators(state.language);
  draw();
}

function show(name, option, frame = 0) {
  state.scene = name in SCENES ? name : Object.keys(SCENES)[0];
  state.option = option in runs() ? option : Object.keys(runs())[0];
  state.frame = frame;
  drawPage();
}

function move(to) {
  state.frame = to;
  draw();
}

$("first").onclick = () => move(0);
$("back").onclick = () => move(state.frame - 1);
$("next").onclick = () => move(state.frame + 1);
$("last").onclick = () => move(Infinity);
$("slider").oninput = () => move(Number($("slider").value));
$("language").onclick = () => {
  state.language = state.language === "zh" ? "en" : "zh";
  drawPage();
};
document.onkeydown = (event) => {
  if (event.target.closest("input, select")) return;
  const to = { ArrowRight: state.frame + 1, ArrowLeft: state.frame - 1, Home: 0, End: Infinity }[event.key];
  if (to !== undefined) move(to);
};

let touched = null;
$("stage").ontouchstart = (event) => (touched = event.touches[0].clientX);
$("stage").ontouchend = (event) => {
  const way = event.changedTouches[0].clientX - touched;
  if (Math.abs(way) > 50) move(state.frame + (way < 0 ? 1 : -1));
};

function open() {
  const [name, option, frame, language] = location.hash.slice(1).split("/");
  state.language = language || (navigator.language.startsWith("zh") ? "zh" : "en");
  show(name, option, Number(frame) || 0);
}
window.onhashchange = open;
open();
