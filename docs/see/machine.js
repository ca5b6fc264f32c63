// Draws time, a row per rank, and who has what, a stripe per rank; computes "A step in time", in ms.

function svg(tag, parent, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  parent?.append(element);
  return element;
}

const hue = (rank) => `--color: var(--rank${rank % 8})`;

// Draw {ranks, blocks: [{rank, kind, from, to}], calls, arrows, places, at(place), totals, ticks, end}.
// Add to it x(time), timeAt(x) and show(time), which moves the playhead.
function drawDiagram(root, m) {
  const width = root.parentElement.clientWidth;
  const [left, right, top] = [54, m.totals.length ? 54 : 28, 22];
  const bar = m.ranks.length > 4 ? 16 : 22;
  const row = bar + 6;
  const wire = top + m.ranks.length * row; // where the messages are
  const bottom = wire + (m.calls.length ? 20 : 0);
  const height = bottom + 16 * m.totals.length + (m.ticks.length ? 18 : 2);
  m.x = (time) => left + (time / m.end) * (width - left - right);
  m.timeAt = (x) => ((x - left) / (width - left - right)) * m.end;
  root.replaceChildren();
  root.setAttribute("viewBox", `0 0 ${width} ${height}`);
  root.setAttribute("height", height);
  const hatch = { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" };
  svg("rect", svg("pattern", root, hatch), { width: 2, height: 6, class: "stroke" });
  svg("circle", svg("pattern", root, { id: "dots", width: 5, height: 5, patternUnits: "userSpaceOnUse" }), { cx: 2, cy: 2, r: 1, class: "dot" });
  const apart = m.ticks.length > 1 ? Math.ceil(70 / (m.x(m.ticks[1]) - m.x(0))) : 1;
  for (const time of m.ticks.filter((_, k) => k % apart === 0)) {
    svg("line", root, { x1: m.x(time), x2: m.x(time), y1: top, y2: bottom, class: "tick" });
    svg("text", root, { x: m.x(time), y: height - 4, "text-anchor": "middle" }, `${time} ms`);
  }
  const box = (group, one, kind, y, height) => {
    const size = Math.max(1, m.x(one.to) - m.x(one.from) - 1);
    svg("rect", group, { x: m.x(one.from), y, width: size, height, rx: 2, class: `block ${kind}` }).block = one;
  };
  m.ranks.forEach((rank, index) => {
    const y = top + index * row;
    const group = svg("g", root, { style: hue(rank) });
    svg("text", group, { x: 0, y: y + bar - 6, class: "name" }, `rank ${rank}`);
    for (const one of m.blocks) if (one.rank === rank && one.to > one.from) box(group, one, one.kind, y, bar);
  });
  if (m.calls.length) svg("text", root, { x: 0, y: wire + 12 }, say(PAGE.network));
  for (const call of m.calls) {
    for (const part of split(call, m.busy)) box(root, part, part.exposed ? "call late" : "call", wire + 2, 13);
    const middle = m.x((call.from + call.to) / 2);
    if (m.x(call.to) - m.x(call.from) > 13) svg("text", root, { x: middle, y: wire + 12, class: "number" }, call.label);
  }
  for (const { from, to, start, end } of m.arrows) {
    const [y1, y2] = [from, to].map((rank) => top + m.ranks.indexOf(rank) * row + bar / 2);
    svg("line", root, { x1: m.x(start), y1, x2: m.x(end), y2, class: "arrow" });
  }
  m.totals.forEach(([name, time], index) => {
    const y = bottom + 16 * index + 7;
    svg("text", root, { x: 0, y: y + 4 }, name);
    svg("line", root, { x1: m.x(0), x2: m.x(time), y1: y, y2: y, class: "total" });
    svg("text", root, { x: m.x(time) + 4, y: y + 4 }, `${Math.round(time)} ms`);
  });
  svg("line", root, { x1: m.x(0), x2: m.x(m.end), y1: 9, y2: 9, class: "track" });
  for (const place of m.places) svg("circle", root, { cx: m.x(m.at(place)), cy: 9, r: 3.5, class: "mark" });
  const head = svg("g", root, { class: "head" });
  svg("line", head, { y1: 9, y2: bottom });
  svg("circle", head, { cy: 9, r: 7 });
  m.show = (time) => head.setAttribute("transform", `translate(${m.x(time)} 0)`);
}

// A cell has a stripe for each of the ranks whose numbers are in it.
function drawCell(parent, x, y, width, height, stripes, count) {
  svg("rect", parent, { x, y, width, height, class: "cell" });
  for (const rank of stripes) {
    svg("rect", parent, { x, y: y + (rank * height) / count, width, height: height / count, class: "stripe", style: hue(rank) });
  }
}

// Draw ranks in a ring. nodes: [{rank, cells: [stripes]}]; packets: [{from, at, stripes, text}]
function drawRing(root, nodes, packets, count, title) {
  root.replaceChildren();
  const n = nodes.length;
  const radius = n > 4 ? 26 : 44;
  const away = n > 1 ? 1 : 0;
  const place = (k) => [160 + 114 * away * Math.sin((2 * Math.PI * k) / n), 150 - 104 * away * Math.cos((2 * Math.PI * k) / n)];
  nodes.forEach((_, k) => {
    const [[x1, y1], [x2, y2]] = [place(k), place(k + 1)];
    svg("line", root, { x1, y1, x2, y2, class: packets.length ? "link busy" : "link" });
  });
  nodes.forEach(({ rank, cells }, k) => {
    const [x, y] = place(k);
    const group = svg("g", root, { style: hue(rank) });
    svg("circle", group, { cx: x, cy: y, r: radius, class: "node" });
    svg("text", group, { x, y: y - 6, class: "name", "text-anchor": "middle" }, `rank ${rank}`);
    const size = Math.min(15, (2 * radius - 8) / cells.length);
    cells.forEach((stripes, index) => drawCell(group, x + (index - cells.length / 2) * size + 0.5, y, size - 1, radius / 2, stripes, count));
  });
  for (const { from, at, stripes, text = "" } of packets) {
    const [[x1, y1], [x2, y2]] = [place(from), place(from + 1)];
    const edge = (radius + 8) / Math.hypot(x2 - x1, y2 - y1);
    const way = edge + (1 - 2 * edge) * at; // from the edge of one circle to that of the next
    const [x, y] = [x1 * (1 - way) + x2 * way, y1 * (1 - way) + y2 * way];
    drawCell(root, x - 8, y - 9, 16, 18, stripes, count);
    svg("text", root, { x: x + (x - 160) * 0.5, y: y + (y - 150) * 0.4 + 4, class: "name", "text-anchor": "middle" }, text);
  }
  title.forEach((line, k) => svg("text", root, { x: 160, y: 154 + 16 * (k - (title.length - 1) / 2), "text-anchor": "middle" }, line));
}

// "A step in time"

const numbersTo = (count, from = 0) => [...Array(count).keys()].map((k) => k + from);

// Return [[from, to]] of the times in which some rank computes or reads.
function busyTimes(blocks) {
  const busy = [];
  for (const { from, to } of blocks.filter((one) => /read|ward/.test(one.kind)).sort((a, b) => a.from - b.from)) {
    if (busy.length && from <= busy.at(-1)[1] + 1e-6) busy.at(-1)[1] = Math.max(busy.at(-1)[1], to);
    else busy.push([from, to]);
  }
  return busy;
}

// Divide a block or a call where the ranks begin or end to compute. exposed: nobody computes meanwhile.
function split(one, busy) {
  const edges = [one.from, ...busy.flat().filter((time) => one.from < time && time < one.to), one.to];
  return edges.slice(1).map((to, k) => {
    const middle = (edges[k] + to) / 2;
    return { ...one, from: edges[k], to, exposed: !busy.some(([begin, end]) => begin <= middle && middle < end) };
  });
}

// A time axis that does not change with each small change of a slider.
const AXES = [100, 200, 300, 400, 500, 700, 1000, 1500, 2000, 3000, 4000, 5000, 7000, 10000, 15000, 20000, 50000];
const axisOf = (time) => AXES.find((end) => end >= time) ?? time;

// Return what drawDiagram draws of a step, and the numbers of the sentence above it.
function stepInTime(option, c) {
  const ranks = Math.max(c.n, option === "hang" || option === "dies" ? 2 : 1);
  const last = ranks - 1;
  const lateness = ranks > 1 ? c.late : 0;
  const s = { ranks, machine: 1, inside: 240e9, network: (c.net * 1e9) / 8, gradients: 100e6, layers: 8, bucket: c.bucket * MIB };
  Object.assign(s, { forward: 0.04, backward: 0.08, optimizer: 0.008, micro: c.micro, steps: 1, sends: "last", late: { [last]: lateness / 1000 } });
  const dies = { [last]: lateness / 1000 + s.forward + 0.45 * s.backward };
  const forgotten = { sends: "always" };
  const changes = { forgotten, model: { sends: "never" }, hang: { steps: 2, barrier: true }, dies: { dies } };
  const m = trace(option === "fsdp" ? "fsdp" : "ddp", { ...s, ...changes[option] });
  const end = m.end + (m.stuck.length ? 0.02 : 0);
  for (const { rank, from, kind = "wait" } of m.stuck) m.blocks.push({ rank, kind, from, to: end, stuck: true });
  if (option === "dies") { // the others fail, are started again, and repeat the step
    const later = (one) => ({ ...one, from: one.from + end + 0.05, to: one.to + end + 0.05, again: true });
    const again = trace("ddp", { ...s, ranks: last, late: {} });
    for (const rank of numbersTo(last)) m.blocks.push({ rank, kind: "restart", from: end, to: end + 0.05 });
    m.blocks.push(...again.blocks.map(later));
    m.calls.push(...again.calls.map(later));
  }
  const inMs = (one) => ({ ...one, from: 1000 * one.from, to: 1000 * one.to });
  const busy = busyTimes(m.blocks.map(inMs));
  const waits = (one) => one.kind === "wait" && !one.stuck;
  const divide = (one) => (waits(one) ? split(one, busy).map((part) => ({ ...part, kind: part.exposed ? "exposed" : "wait" })) : [one]);
  const blocks = m.blocks.map(inMs).flatMap(divide);
  const calls = m.calls.filter((call) => call.to > call.from).map(inMs);
  const buckets = bucketsOf(s).map(String);
  for (const call of calls) call.label = option === "fsdp" ? call.of[0] : buckets.indexOf(String(call.of)) + 1;
  const ms = (seconds) => Math.round(1000 * seconds);
  const alone = s.micro * (s.forward + s.backward) + s.optimizer;
  const shared = option === "fsdp" ? s.optimizer * (1 - 1 / ranks) : 0; // the ranks share the optimizer's work
  const exposed = Math.max(0, m.end - lateness / 1000 - alone + shared);
  const sending = m.calls.reduce((sum, { from, to }) => sum + to - from, 0);
  const ddp = trace("ddp", s).end;
  const other = option === "ddp" ? trace("ddp", { ...s, ...forgotten }).end : ddp;
  const numbers = {
    n: ranks, last, end: ms(m.end), alone: ms(alone), late: lateness, shared: ms(shared), exposed: ms(exposed), hidden: ms(Math.max(0, sending - exposed)), at: ms(dies[last]),
    share: Math.round((100 * alone) / m.end), other: ms(other), all: s.micro * buckets.length, once: buckets.length, saved: (s.micro - 1) * buckets.length,
    whole: 400, kept: Math.round(400 / ranks),
  };
  const says = (more) => ["ddp", "hides", ...(s.micro > 1 ? [more] : [])];
  const sentences = { ddp: says("saves"), forgotten: says("forgotten"), fsdp: ["ddp", "fsdp"] }[option] ?? [option];
  const totals = [["1 GPU", 1000 * alone]];
  if (option === "ddp" && lateness) totals.push([say(PAGE.onTime), 1000 * trace("ddp", { ...s, late: {} }).end]);
  else if (option !== "ddp") totals.push([option === "forgotten" ? "no_sync" : "DDP", 1000 * ddp]);
  const whole = Math.max(...blocks.map((one) => one.to));
  const widest = m.stuck.length ? whole : axisOf(Math.max(whole, 1000 * ddp));
  const tick = [20, 50, 100, 200, 500, 1000, 2000, 5000].find((one) => whole / one < 8) ?? 10000;
  const began = option === "dies" ? 1000 * end : whole; // then seconds pass that have no scale
  return {
    option, s, blocks, calls, busy, numbers, sentences: ranks > 1 ? sentences : ["one"], totals: m.stuck.length || ranks === 1 ? [] : totals, arrows: [],
    ranks: numbersTo(Math.min(8, ranks)).map((rank) => (rank === 7 ? last : rank)), end: widest, last: whole, at: (time) => time,
    died: option === "dies" ? 1000 * dies[last] : Infinity, began, places: momentsOf(blocks, calls, whole),
    ticks: numbersTo(Math.floor((m.stuck.length ? began : widest) / tick) + 1).map((k) => k * tick),
  };
}

// The moments of a step, at most about 14: something begins on a rank, or is half through.
function momentsOf(blocks, calls, end) {
  const firsts = ["read", "restart", "optimizer"].flatMap((kind) => blocks.filter((one) => one.kind === kind).slice(0, 1));
  const isFirstLayer = (one) => !one.of || one.of[0] === blocks.find((other) => other.kind === one.kind).of[0];
  const passes = blocks.filter((one) => one.rank === 0 && /ward/.test(one.kind) && isFirstLayer(one));
  const long = [...calls, ...blocks.filter(({ kind, rank, from, to }) => rank === 0 && /wait|exposed/.test(kind) && to - from > end / 50)];
  const times = [...[...firsts, ...passes].map((one) => one.from), ...long.map(({ from, to }) => (from + to) / 2), 0, end];
  const sorted = times.sort((a, b) => a - b).filter((time, k) => k === 0 || time - times[k - 1] > end / 200);
  const thin = Math.ceil(sorted.length / 14);
  return sorted.filter((_, k) => k % thin === 0 || k === sorted.length - 1);
}

const during = (m, time) => (one) => one.from <= time && (time < one.to || (time >= m.last && one.to >= m.last));

// Return the state at a time: the names of its sentences, and what these name.
function stateAt(m, time) {
  const now = m.blocks.filter(during(m, time));
  const who = (kinds) => [...new Set(now.filter((one) => kinds.test(one.kind)).map((one) => one.rank))];
  const call = m.calls.find(during(m, time));
  const state = { who: who(/wait/), others: who(/read|ward/), bucket: call?.label };
  const named = (...names) => ({ ...state, names });
  if (who(/restart/).length) return named("restart");
  if (time >= m.died && time < m.began) return { ...named("killed"), who: [m.s.ranks - 1] };
  if (now.some((one) => one.stuck)) return named(now.every((one) => one.stuck) ? "hang" : "barrier");
  const waits = state.who.length ? [m.option === "fsdp" ? "absent" : "wait"] : [];
  if (call) return named(...waits, call.kind, waits.length ? "beside" : state.others.length ? "hidden" : "exposed");
  if (waits.length) return named(...waits);
  if (who(/read/).length) return { ...named("read"), who: who(/read/) };
  if (m.option === "model") return named(who(/optimizer/).length ? "apart" : "unseen");
  if (m.option === "fsdp" && !who(/optimizer/).length) return named("whole");
  const sendsLater = (one) => one.kind === "backward" && one.micro + 1 < m.s.micro;
  if (m.option !== "forgotten" && now.some(sendsLater)) return named("adds");
  return named(["backward", "forward"].find((kind) => who(RegExp(kind)).length) ?? "optimizer");
}

// Before the first wait: [the place from which to ask who will wait, to which, the answer].
function firstWait(m) {
  const waits = m.blocks.filter(({ kind, from, to }) => /wait|barrier|exposed/.test(kind) && to - from > 1);
  const first = Math.min(...waits.map((one) => one.from));
  return [first - 14, first, waits.filter((one) => one.from < first + 1 && m.ranks.includes(one.rank)).map((one) => one.rank)];
}

// Draw the ring at a time of a step: the buckets, or in FSDP the blocks, that each rank has.
function drawStepRing(root, m, time) {
  const again = m.blocks.some((one) => one.again && one.from <= time); // a new step or start has nothing
  const n = m.s.ranks - (again && m.died < time ? 1 : 0);
  const everyone = numbersTo(n);
  const done = (all) => all.filter((one) => one.to <= time && Boolean(one.again) === again);
  const computes = done(m.blocks).filter((one) => one.of);
  const has = (one, of) => String(one.of) === String(of);
  const cellsOf = (rank) => {
    if (m.option === "fsdp") {
      return numbersTo(8, 1).map((block) => {
        const gathered = done(m.calls).filter((call) => call.kind === "all_gather" && has(call, [block]));
        return gathered.length > computes.filter((one) => one.rank === rank && has(one, [block])).length ? everyone : [rank];
      });
    }
    return bucketsOf(m.s).map((of) => {
      if (done(m.calls).some((call) => has(call, of))) return everyone;
      return computes.some((one) => one.rank === rank && one.kind === "backward" && has(one, of.slice(-1))) ? [rank] : [];
    });
  };
  const shown = m.ranks.filter((rank) => time < m.died || rank < m.s.ranks - 1);
  const call = m.calls.find((one) => one.from <= time && time < one.to);
  const packets = [];
  const title = call || n === 1 ? [] : [say(PAGE.silent)];
  if (call) {
    const rounds = call.kind === "all_reduce" ? 2 * (n - 1) : n - 1;
    const through = ((time - call.from) / (call.to - call.from)) * rounds;
    const round = Math.floor(through);
    const gathers = call.kind === "all_gather" || round >= n - 1;
    const label = `${m.option === "fsdp" ? "block" : "bucket"} ${call.label}`;
    title.push(label, gathers ? "all-gather" : "reduce-scatter", say(PAGE.round, [round + 1, rounds]));
    shown.forEach((rank, from) => {
      const behind = (k) => (rank - k + 2 * n) % n; // in round k a rank sends the piece that came k ranks far
      const sums = gathers ? everyone : numbersTo(round + 1).map(behind);
      packets.push({ from, at: through - round, stripes: call.kind === "all_gather" ? [behind(round)] : sums });
    });
  }
  if (n > 8) title.push(`${n} ranks`);
  drawRing(root, shown.map((rank) => ({ rank, cells: cellsOf(rank) })), packets, n, title);
}

// The lines of the program: [text, the kinds of blocks in it].
function programOf(option, micro) {
  const accumulates = micro > 1 && option !== "fsdp" && option !== "forgotten";
  const indent = accumulates ? "    " : "";
  const name = option === "fsdp" || option === "model" ? "model" : "ddp";
  const lines = [["images, targets = next(batches)", "read"]];
  if (accumulates) lines.push(["with nullcontext() if last else ddp.no_sync():", ""]);
  lines.push([`${indent}loss = criterion(${name}(images), targets)`, "forward"], [`${indent}loss.backward()`, "backward wait exposed"]);
  if (micro > 1) {
    for (const line of lines) line[0] = `    ${line[0]}`;
    lines.unshift([`for micro in range(${micro}):`, ""]);
    if (accumulates) lines.splice(1, 0, [`    last = micro == ${micro - 1}`, ""]);
  }
  lines.push(["optimizer.step()", "optimizer"]);
  if (option === "fsdp") lines.unshift(["for block in model.blocks:", ""], ["    fully_shard(block)", ""]);
  if (option === "hang") lines.push(["if rank == 0:", ""], ["    dist.barrier()", "barrier"]);
  return lines;
}
