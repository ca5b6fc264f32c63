// The page. A place is a frame of a scene of runs.js, or in "A step in time" milliseconds.

const $ = (id) => document.getElementById(id);
const state = { playing: 0 }; // and scene, option, at (the place), language, every, beside
let diagram = null; // what drawDiagram has drawn

function make(tag, parent, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  parent?.append(element);
  return element;
}

// Texts are [English, Chinese]: return the reader's, where {name} stands for a value.
const say = (texts, values = {}) => texts[state.language === "zh" ? 1 : 0].replace(/\{(\w+)\}/g, (_, name) => values[name]);

// Append a text in which *words* are bold.
function write(parent, text) {
  text.split("*").forEach((part, k) => parent.append(k % 2 ? make("b", null, { textContent: part }) : part));
}

const namesOf = (ranks) => (ranks.length > 4 ? `rank ${ranks[0]}–${ranks.at(-1)}` : ranks.map((rank) => `rank ${rank}`).join(", "));
const scene = () => SCENES[state.scene];
const computed = () => state.scene === "time";
const calculates = () => !(state.scene in SCENES);
const run = (option = state.option) => RUNS[state.scene][option];
const options = () => Object.keys(computed() ? scene().options : RUNS[state.scene] ?? {});

// Return the values of a rank at a frame: a frame holds only those that have changed.
function valuesAt(one, rank, frame) {
  let values = {};
  for (const { ranks } of one.frames.slice(0, frame + 1)) {
    if (ranks[rank].fresh) values = {}; // another function or process: it has nothing of the one before
    Object.assign(values, ranks[rank].values);
  }
  return values;
}

// Say what a rank does.
function describe(one, hangs) {
  const callName = (call) => {
    const [name, ...numbers] = call.split(" ");
    const text = scene().names?.[name] ?? PAGE.does[name];
    return text ? say(text, numbers) : call;
  };
  const calls = (one.calls ?? []).map(callName).join(", ");
  const of = [one.of ?? []].flat().map((name) => say(scene().names[name])).join(", ");
  return say(PAGE.does[hangs && calls ? "hangs" : one.kind], { ...one, calls, of });
}

// The notes of a frame: those of its events and of the lines that its ranks are at.
function notesOf(frame) {
  const lines = run().program.split("\n");
  const found = new Map(); // {note: its ranks}
  frame.ranks.forEach((one, rank) => {
    const line = one.line ? lines[one.line - 1] : "";
    const place = [`${one.line}:`, line, one.calls ?? [], one.of ?? []].flat().join(" ");
    const key = frame.hang ? "hang" : one.kind;
    const fits = (where) => { // "@wait barrier": an event, and words of its line or calls; else text of a line
      if (!where.startsWith("@")) return one.kind === "line" && line.includes(where);
      const [kind, ...words] = where.slice(1).split(" ");
      return kind === key && words.every((word) => place.includes(word));
    };
    const note = scene().notes.find(([where, , , only]) => fits(where) && (!only || only.split(" ").includes(state.option)));
    if (note) found.set(note, [...(found.get(note) ?? []), rank]);
  });
  const several = found.size > 1;
  return [...found].map(([[, ...texts], ranks]) => (several ? `${namesOf(ranks)}${say([": ", "："])}` : "") + say(texts));
}

// The frame of another variant at the moment of this one: rank 0 is as often in this event at this line.
function sameMoment(from, to, frame) {
  const textOf = (one, line) => one.program.split("\n")[line - 1]?.trim().replace("ddp(", "model(");
  const nameOf = (one) => ({ ranks: [{ line, kind }] }) => `${kind} ${textOf(one, line)}`;
  const names = from.frames.slice(0, frame + 1).map(nameOf(from));
  const others = to.frames.map(nameOf(to));
  // A wait of several frames counts once.
  const begins = (name) => (one, k, all) => one === name && !(name.startsWith("wait") && all[k - 1] === name);
  for (; names.length; names.pop()) {
    const times = names.filter(begins(names.at(-1))).length;
    const places = [...others.keys()].filter((k) => begins(names.at(-1))(others[k], k, others));
    if (places.length >= times) return places[times - 1];
  }
  return 0;
}

// Drawing a record

function drawValue(parent, label, value, isNew, limit) {
  const box = make("div", parent, { className: isNew ? "value new" : "value" });
  make("span", box, { textContent: `${say(scene().labels[label] ?? [label, label])} ${limit ? `${value} / ${limit}` : ""} ` });
  if (limit) {
    make("div", make("div", box, { className: "bar" })).style.width = `${Math.min(100, (100 * value) / limit)}%`;
    return;
  }
  const rows = [value].flat().some(Array.isArray) ? value : [[value].flat()];
  const grid = make("div", box, { className: "grid" });
  grid.style.gridTemplateColumns = `repeat(${Math.max(1, rows[0].length)}, auto)`;
  for (const number of rows.flat()) make("div", grid, { className: "cell", textContent: number });
}

function drawLanes(one, at) {
  const frame = one.frames[at];
  frame.ranks.forEach((does, rank) => {
    const kind = does.kind === "receive" ? "wait" : does.kind;
    const lane = make("div", $("lanes"), { className: `lane ${kind}`, style: hue(rank) });
    const heading = make("h3", lane, { textContent: `rank ${rank} ` });
    if ("ms" in does) make("small", heading, { textContent: `${does.ms} ms` });
    make("p", lane, { className: "does", textContent: describe(does, frame.hang) });
    const values = kind === "gone" ? {} : valuesAt(one, rank, at);
    for (const label of scene().watch.filter((label) => values[label] != null)) {
      drawValue(lane, label, values[label], label in (does.values ?? {}), scene().bars?.[label]);
    }
  });
}

// lines: {text, the ranks that are at it, which of them wait, whether the variant has changed it}
function drawCode(lines) {
  $("code").replaceChildren();
  for (const { text, ranks, waits, changed } of lines) {
    const item = make("li", $("code"), { className: `${ranks.length ? "here" : ""} ${changed ? "changed" : ""}` });
    const gutter = make("i", item);
    const few = ranks.length <= 4;
    for (const rank of few ? ranks : []) make("b", gutter, { textContent: rank, style: hue(rank), className: waits?.(rank) ? "waits" : "" });
    if (!few) make("b", gutter, { textContent: `${ranks[0]}–${ranks.at(-1)}`, style: "--color: var(--grey)" });
    const indent = text.search(/\S|$/) + 2; // of what is wrapped
    make("span", item, { textContent: text || " ", style: `padding-left: ${indent}ch; text-indent: -${indent}ch` });
  }
  const marked = $("code").querySelector(".here"); // the panel may be lower than the program
  if (marked) $("code").scrollTop = marked.offsetTop - $("code").offsetTop - 60;
}

// Return what drawDiagram draws of a record: the frames of each rank; of a slow rank, in its milliseconds.
function recordedDiagram() {
  const { frames } = run();
  const clock = state.option === "slow";
  const ranks = [...frames[0].ranks.keys()];
  const when = (rank, k) => (clock ? frames[Math.min(k, frames.length - 1)].ranks[rank].ms : k);
  const at = (k) => Math.max(...ranks.map((rank) => when(rank, Math.floor(k)))) + (k % 1);
  const blocks = [];
  const arrows = [];
  frames.forEach((frame, k) => frame.ranks.forEach(({ kind, to }, rank) => {
    blocks.push({ rank, kind: kind === "receive" ? "wait" : kind, from: when(rank, k), to: when(rank, k + 1), frame: k });
    const arrives = frames.findIndex((later, after) => after > k && later.ranks[to]?.kind === "done");
    if (kind === "send") arrows.push({ from: rank, to, start: k, end: arrives });
  }));
  const ticks = clock ? [0, 200, 400, 600, 800] : [];
  const places = state.every ? [...frames.keys()] : scene().moments[state.option];
  return { ranks, blocks, arrows, calls: [], totals: [], end: at(frames.length), last: frames.length - 1, ticks, at, places };
}

// A rank's numbers are in its decimal place, so that a sum shows who is in it.
function drawRecordedRing() {
  const frame = Math.floor(state.at);
  const inSum = (value) => diagram.ranks.filter((rank) => Math.floor(value / 10 ** rank) % 10);
  const nodes = diagram.ranks.map((rank) => ({ rank, cells: valuesAt(run(), rank, frame).tensor.map(inSum) }));
  const flying = diagram.arrows.filter(({ start, end }) => start <= state.at && state.at < end);
  const packets = flying.map(({ from, start, end }) => {
    const [value] = run().frames[start].ranks[from].sent;
    return { from, at: (state.at - start) / (end - start), stripes: inSum(value), text: value };
  });
  drawRing($("ring"), nodes, packets, 4, packets.length ? [] : [say(PAGE.silent)]);
}

function drawRecorded() {
  const { frames, says, program } = run();
  const at = Math.floor(state.at);
  const frame = frames[at];
  $("place").textContent = `${diagram.places.filter((place) => place <= at).length} / ${diagram.places.length}`;
  let notes = [];
  for (let k = at; k >= 0 && !notes.length; k--) notes = notesOf(frames[k]); // that of a frame before
  $("note").textContent = notes.join("\n");
  if (frame.hang && says) make("pre", $("note"), { textContent: says });
  const own = program.split("\n");
  const first = run(options()[0]).program.split("\n");
  const begin = own.findIndex((line) => line.startsWith(`def ${scene().functions[0]}`) || line.startsWith("class "));
  const main = own.findIndex((line, index) => index > begin && /^(def main|if __name__)/.test(line));
  const ranksAt = (index) => diagram.ranks.filter((rank) => frame.ranks[rank].line === index + 1);
  const lines = own.map((text, index) => ({ text, changed: !first.includes(text), ranks: ranksAt(index) }));
  drawCode(lines.slice(begin, main < 0 ? own.length : main - 2));
  $("lanes").replaceChildren();
  drawLanes(run(), at);
  if (state.beside) {
    const heading = make("p", $("lanes"), { textContent: `${say(PAGE.beside)} ${say(scene().options[state.beside])} ` });
    make("button", heading, { type: "button", textContent: "×", ariaLabel: say(PAGE.alone), onclick: () => show({ beside: null }) });
    drawLanes(run(state.beside), sameMoment(run(), run(state.beside), at));
  }
  if (state.scene === "ring") drawRecordedRing();
}

function drawComputed() {
  const { names, who, others, bucket } = stateAt(diagram, state.at);
  $("place").textContent = `${Math.round(state.at)} / ${Math.round(diagram.last)} ms`;
  $("note").replaceChildren();
  const all = others.length === diagram.s.ranks;
  const values = { who: namesOf(who), others: all ? say(PAGE.all) : namesOf(others), bucket };
  write($("note"), names.map((name) => say(scene().states[name], values)).join(state.language === "zh" ? "" : " "));
  const now = diagram.blocks.filter(during(diagram, state.at));
  const does = (rank, kinds) => now.some((one) => one.rank === rank && kinds.split(" ").includes(one.line ?? one.kind));
  const waits = (rank) => now.some((one) => one.rank === rank && /wait|exposed|barrier/.test(one.kind));
  const lines = programOf(state.option, chosen.micro);
  drawCode(lines.map(([text, kinds]) => ({ text, waits, ranks: diagram.ranks.filter((rank) => does(rank, kinds)) })));
  drawStepRing($("ring"), diagram, state.at);
}

// Draw what changes with the place.
function draw() {
  state.at = Math.max(0, Math.min(state.at, diagram.last));
  diagram.show(diagram.at(state.at));
  (computed() ? drawComputed : drawRecorded)();
  $("back").disabled = state.at <= 0;
  $("next").disabled = state.at >= diagram.last;
  const values = { valuemax: diagram.last, valuenow: state.at, valuetext: `${$("place").textContent}. ${$("note").textContent}` };
  for (const [name, value] of Object.entries(values)) $("diagram").setAttribute(`aria-${name}`, value);
  drawQuestion();
  $("play").textContent = state.playing ? "❚❚" : "▶";
  $("play").ariaLabel = say(state.playing ? PAGE.pause : PAGE.play);
  if (!state.playing) saveHash();
}

// Before a collective, ask who waits: once in a scene, and only at this place.
function drawQuestion() {
  if (state.answered) return;
  const [from, to, waiting] = computed() ? firstWait(diagram) : [...(scene().ask?.[state.option] ?? [])];
  if (!(from <= state.at && state.at < to)) return $("ask").replaceChildren();
  if ($("ask").childElementCount) return;
  const answer = (ranks) => {
    const right = ranks.some((rank) => waiting.includes(rank));
    state.answered = true;
    $("ask").replaceChildren(make("span", null, { textContent: say(right ? PAGE.right : PAGE.wrong, { who: namesOf(waiting) }) }));
    play(true);
  };
  $("ask").append(say(PAGE.ask));
  for (const ranks of [...diagram.ranks.map((rank) => [rank]), []]) {
    make("button", $("ask"), { type: "button", textContent: namesOf(ranks) || say(PAGE.nobody), onclick: () => answer(ranks) });
  }
}

// Where a block of a computed step was recorded.
const RECORDS = {
  read: "step/slow/12", exposed: "step/ddp/12", "fsdp exposed": "fsdp/fsdp/4", forward: "step/ddp/6", backward: "step/ddp/8", optimizer: "step/ddp/14", wait: "step/slow/19", barrier: "step/hang/24",
  "fsdp forward": "fsdp/fsdp/7", "fsdp backward": "fsdp/fsdp/24", "fsdp optimizer": "fsdp/fsdp/36", "fsdp wait": "fsdp/fsdp/4",
  all_reduce: "step/ddp/12", all_gather: "fsdp/fsdp/6", reduce_scatter: "fsdp/fsdp/27", restart: "machine/machine/25",
};

// Say what a block is, and lead to what was recorded there.
function pick({ rank, kind, of, from, to }) {
  const [name, option, frame] = (RECORDS[`${state.option} ${kind}`] ?? RECORDS[kind]).split("/");
  const layers = of ? ` (${say(PAGE.layer)} ${of.join(", ")})` : "";
  const ranks = rank === undefined ? "" : `rank ${rank}: `;
  $("block").textContent = `${ranks}${say(scene().kinds[kind])}${layers}, ${Math.round(from)}–${Math.round(to)} ms. `;
  make("a", $("block"), { href: `#${name}/${option}/${frame}/${state.language}`, textContent: say(PAGE.see) });
}

// The page around a scene

function drawButtons(parent, names, chosenName, text, action) {
  parent.replaceChildren();
  for (const name of names) {
    const button = make("button", parent, { type: "button", textContent: text(name), onclick: () => action(name) });
    button.setAttribute("aria-pressed", name === chosenName);
    // scrollIntoView() would also scroll a page that embeds this one
    if (button.ariaPressed === "true") parent.scrollLeft = button.offsetLeft - parent.clientWidth / 2;
  }
}

// The address of a chapter: in the clone, or in the site, in which the Chinese pages are another site.
function chapterAddress(name) {
  const folder = state.language === "zh" ? "zh/" : "";
  if (location.protocol === "file:" && !location.pathname.includes("/site/")) return `../${folder}${name}.md`;
  return `../../${location.pathname.includes("/zh/docs/see/") ? "../" : ""}${folder}docs/${folder}${name}.html`;
}

function drawPage() {
  const one = scene() ?? PAGE[state.scene];
  const embed = new URLSearchParams(location.search).has("embed") ? "embed" : "";
  document.documentElement.lang = state.language === "zh" ? "zh-CN" : "en";
  document.body.className = `${calculates() ? "calculates" : computed() ? "computed" : "recorded"} ${state.scene} ${embed}`;
  document.title = $("title").textContent = say(PAGE.title);
  $("language").textContent = state.language === "zh" ? "English" : "中文";
  $("question").textContent = say(one.questions?.[state.option] ?? one.question ?? one.title);
  $("kind").textContent = say(calculates() || computed() ? PAGE.computed : PAGE.recorded);
  $("about").textContent = `${say(one.about)} `;
  make("a", $("about"), { href: chapterAddress(one.chapter), textContent: say(PAGE.chapter) });
  $("run").textContent = one.run ? `${say(PAGE.run)} ${one.run} ${one.flags}` : "";
  const all = [...Object.keys(SCENES), "fit", "scale"];
  drawButtons($("scenes"), all, state.scene, (name) => say((SCENES[name] ?? PAGE[name]).title), (name) => show({ scene: name, option: null, at: 0, beside: null }));
  drawButtons($("switches"), options().length > 1 ? options() : [], state.option, (name) => say(one.options[name]), changeOption);
  state.answered = false;
  for (const id of ["knobs", "numbers", "ask", "block", "lanes", "calculator"]) $(id).replaceChildren();
  if (calculates()) return drawCalculator(state.scene);
  if (computed()) drawKnobs($("knobs"), "time", drawScene);
  for (const id of ["back", "next"]) $(id).ariaLabel = say(PAGE[id]);
  $("diagram").ariaLabel = $("question").textContent;
  $("ring").ariaLabel = say(one.title);
  $("every").checked = state.every;
  $("every").nextElementSibling.textContent = say(PAGE.every);
  $("legend").replaceChildren(...Object.entries(PAGE.legend).map(([name, text]) => make("span", null, { className: name, textContent: say(text) })));
  $("block").textContent = computed() ? say(PAGE.tap) : "";
  drawScene();
}

// Draw a scene anew: its settings or the width have changed.
function drawScene() {
  diagram = computed() ? stepInTime(state.option, chosen) : recordedDiagram();
  drawDiagram($("diagram"), diagram);
  $("numbers").replaceChildren();
  for (const name of diagram.sentences ?? []) write($("numbers"), say(scene().numbers[name], diagram.numbers));
  draw();
}

function show(changes) {
  Object.assign(state, changes, { playing: 0 });
  if (!(state.scene in SCENES) && !(state.scene in KNOBS)) state.scene = "time";
  if (!options().includes(state.option)) state.option = options()[0] ?? "-";
  const raise = state.option === "forgotten" && chosen.micro === 1; // one micro-batch has nothing to forget
  if (raise) chosen.micro = 2;
  else if (state.raised && state.option !== "forgotten") chosen.micro = 1;
  state.raised = raise || (state.raised && state.option === "forgotten");
  if (!options().includes(state.beside) || state.beside === state.option) state.beside = null;
  drawPage();
}

// A switch keeps the moment. A record then shows both variants.
function changeOption(option) {
  if (computed()) return show({ option });
  show({ option, at: sameMoment(run(), run(option), Math.floor(state.at)), beside: state.option });
}

function move(to) {
  state.playing = 0;
  state.at = to;
  draw();
}

const after = (at) => diagram.places.find((one) => one > at + 0.01) ?? diagram.last;
const before = (at) => diagram.places.findLast((one) => one < at - 0.01) ?? 0;

// Play or pause. A computed step takes nine seconds, a record two for each moment.
function play(on = !state.playing) {
  const number = (state.playing = on ? performance.now() : 0);
  if (on && state.at >= diagram.last) state.at = 0;
  let last = number;
  const tick = (now) => {
    if (state.playing !== number) return;
    const stretch = computed() ? diagram.last / 4.5 : after(state.at) - before(state.at + 0.02);
    state.at += (Math.max(0, now - last) / 2000) * stretch;
    last = now;
    if (state.at >= diagram.last) state.playing = 0;
    draw();
    requestAnimationFrame(tick);
  };
  draw();
  if (on) requestAnimationFrame(tick);
}

// The diagram is the slider.
function seek(event) {
  const x = event.clientX - $("diagram").getBoundingClientRect().left;
  const distance = (place) => Math.abs(diagram.x(diagram.at(place)) - x);
  if (computed()) return move(diagram.timeAt(x));
  move(diagram.places.reduce((best, place) => (distance(place) < distance(best) ? place : best)));
}
$("diagram").onpointerdown = (event) => {
  $("diagram").setPointerCapture(event.pointerId);
  seek(event);
  if (!computed()) return;
  if (event.target.block) pick(event.target.block);
  else $("block").textContent = say(PAGE.tap);
};
$("diagram").onpointermove = (event) => event.buttons && seek(event);
$("back").onclick = () => move(before(state.at));
$("next").onclick = () => move(after(state.at));
$("play").onclick = () => play();
$("every").onchange = () => show({ every: $("every").checked });
$("language").onclick = () => show({ language: state.language === "zh" ? "en" : "zh" });
document.onkeydown = (event) => {
  if (event.target.closest("input, summary") || calculates()) return;
  const keys = { ArrowRight: () => move(after(state.at)), ArrowLeft: () => move(before(state.at)), Home: () => move(0), End: () => move(Infinity) };
  if (event.key === " " && !event.target.closest("button, a")) keys[" "] = () => play();
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
};
let width = innerWidth; // a phone that scrolls changes the height
window.onresize = () => width !== innerWidth && drawPage((width = innerWidth));

// The address after #: scene/option/place/language/settings

function saveHash() {
  const settings = Object.entries(chosen).filter(([key, value]) => value !== DEFAULTS[key]).map((pair) => pair.join("="));
  if (state.every) settings.push("every=1");
  if (state.beside) settings.push(`beside=${state.beside}`);
  history.replaceState(null, "", `#${[state.scene, state.option, Math.round(state.at), state.language, settings.join("&")].join("/").replace(/\/$/, "")}`);
}

function open() {
  const [name, option, at, language, settings] = location.hash.slice(1).split("/");
  const found = new URLSearchParams(settings);
  for (const [key, value] of Object.entries(DEFAULTS)) chosen[key] = found.has(key) ? Number(found.get(key)) : value;
  const texts = { language: language || (navigator.language.startsWith("zh") ? "zh" : "en") };
  show({ ...texts, scene: name, option, at: Number(at) || 0, every: found.has("every"), beside: found.get("beside") });
}
window.onhashchange = open;
open();

// A page that embeds this one is told the height, and tells its colours.
if (window.parent !== window) {
  new ResizeObserver(() => window.parent.postMessage(document.body.offsetHeight, "*")).observe(document.body);
  window.onmessage = ({ data }) => (document.documentElement.style.colorScheme = data);
}
