// Two calculators: tools/fit.py for a model of equal blocks, and the speed of tools/plan.py.

// Return the memory of the ways to train on s.gpus GPUs: {name, the bytes of each part, sum} each.
function fit(s) {
  const weights = Math.max(1, Math.round(s.weights / s.blocks)); // of a block
  const saved = (s.batch * s.activations) / s.blocks; // by a block, for the backward pass
  const ways = s.gpus === 1 ? [["one GPU", "plain", 1]] : [
    ["DDP", "ddp", s.gpus],
    ["DDP, ZeroRedundancyOptimizer", "zero1", s.gpus],
    ["FSDP, no resharding", "fsdp", s.gpus, false],
    ["FSDP", "fsdp", s.gpus, true],
  ];
  const groups = s.gpus / s.machine;
  if (groups > 1) ways.push([`HSDP, ${groups} x ${s.machine} shards`, "fsdp", s.machine, true]);
  return ways.flatMap(([name, way, shards, reshard]) => [false, true].map((checkpointed) => {
    const model = { ...s, way, shards, reshard, checkpointed, block: weights, saved };
    const moments = way === "fsdp" ? fsdpMoments(model) : ddpMoments(model);
    const sum = (moment) => moment.reduce((a, b) => a + b);
    const peak = moments.reduce((most, one) => (sum(one) > sum(most) ? one : most));
    return { name: checkpointed ? `${name}, checkpointing` : name, parts: peak, sum: sum(peak) };
  }));
}

const STATES = { sgd: 0, momentum: 1, adam: 2 }; // numbers per weight that an optimizer keeps
const kept = (m, blocks) => (blocks * m.saved) / (m.checkpointed ? 16 : 1);
const recomputed = (m) => (m.checkpointed ? (m.saved * 15) / 16 : 0);

// The bytes at each moment of a step: [weights, gradients, optimizer, activations, temporary].
function ddpMoments(m) {
  const weights = 4 * m.block * m.blocks;
  const buckets = m.way === "plain" ? 0 : weights;
  const mine = m.way === "zero1" ? 4 * m.block * Math.ceil(m.blocks / m.shards) : weights;
  const state = STATES[m.optimizer] * mine;
  const casts = m.bf16 ? weights / 2 : 0;
  const moments = [[weights, weights + buckets, state, kept(m, m.blocks), casts]];
  for (let ready = 0; ready < m.blocks; ready++) {
    const activations = kept(m, m.blocks - ready) + recomputed(m);
    moments.push([weights, 4 * m.block * ready + buckets, state, activations, casts]);
  }
  return [...moments, [weights, weights + buckets, state, 0, mine]];
}

function fsdpMoments(m) {
  const shard = 4 * Math.ceil(m.block / m.shards);
  const weights = shard * m.blocks;
  const state = STATES[m.optimizer] * weights;
  const size = (m.bf16 ? 2 : 4) * m.block; // of a gathered block
  const moments = [];
  for (let k = 0; k < m.blocks; k++) {
    const gathered = m.reshard ? size : size * (k + 1);
    moments.push([weights, weights, state, kept(m, k), gathered + size + (k ? size : 0)]);
    moments.push([weights, weights, state, kept(m, k + 1), gathered + size]);
  }
  for (let k = m.blocks - 1; k >= 0; k--) {
    const gathered = size * (k + 1 - (m.reshard ? Math.max(0, k - 1) : 0));
    const temporary = gathered + (k + 1 < m.blocks ? 4 * m.block : 0);
    const reduced = shard * (m.blocks - 1 - k);
    moments.push([weights, reduced, state, kept(m, k + 1) + recomputed(m), temporary]);
    moments.push([weights, reduced, state, kept(m, k), temporary + size]);
  }
  return [...moments, [weights, weights, state, 0, 0]];
}

// Return the speed of each GPU beside one GPU: [without overlap, with perfect overlap].
function scale(s) {
  const count = Math.max(1, Math.round(s.gradients / (25 * 2 ** 20))); // buckets
  const backward = 2 / 3; // of a step
  const seconds = (n, overlap) => {
    const send = allReduce(s.gradients / count, n, s);
    let end = 0;
    for (let k = 1; k <= count; k++) end = Math.max(end, s.step * (1 - backward * (1 - k / count))) + send;
    return (overlap ? end : s.step + count * send) * (1 + 0.02 * expectedMaximum(n));
  };
  return [false, true].map((overlap) => seconds(1, overlap) / seconds(s.gpus, overlap));
}

// Return how many deviations the largest of so many normal values is above their mean.
function expectedMaximum(count) {
  const width = 0.005;
  let [below, before, mean] = [0, 0, 0]; // below: the normal distribution up to here
  for (let edge = -10; edge < 10 - width / 2; edge += width) {
    const middle = edge + width / 2;
    below += (width * Math.exp((-middle * middle) / 2)) / Math.sqrt(2 * Math.PI);
    const now = Math.min(1, below) ** count;
    mean += (now - before) * middle;
    before = now;
  }
  return mean;
}

// What a reader can set: {scene: {name: [its label, the steps of its slider, the first value]}}

const GB = 1e9;
const KNOBS = {
  time: {
    n: [["ranks: {0}", "rank 数：{0}"], [1, 2, 3, 4, 5, 6, 7, 8, 64], 4],
    late: [["last rank late: {0} ms", "最后一个 rank 延迟：{0} ms"], [0, 10, 20, 30, 40, 60, 80, 100], 30],
    net: [["network: {0} Gbit/s", "网络：{0} Gbit/s"], [1, 2, 5, 10, 25, 40, 100, 200, 400], 40],
    bucket: [["bucket: {0} MiB", "bucket：{0} MiB"], [1, 5, 10, 25, 50, 100], 25],
    micro: [["micro-batches: {0}", "micro-batch：{0}"], [1, 2, 4, 8], 1],
  },
  fit: {
    weights: [["{0} million weights", "参数量：{0} M"], [10, 20, 50, 100, 300, 1000, 3000, 7000, 13000], 300],
    activations: [["activations {0} MB per image", "每张图像的激活值 {0} MB"], [20, 50, 100, 200, 400, 900, 2000], 200],
    batch: [["{0} images per GPU", "每块 GPU {0} 张图像"], [1, 2, 4, 8, 16, 32, 64, 128, 256], 32],
    gpus: [["{0} GPUs", "{0} 块 GPU"], [1, 2, 4, 8, 16, 32, 64, 128], 8],
    memory: [["memory {0} GB per GPU", "每块 GPU 显存 {0} GB"], [8, 12, 16, 24, 40, 48, 80, 141], 24],
  },
  scale: {
    step: [["step of one GPU {0} ms", "单块 GPU 每步 {0} ms"], [20, 50, 100, 150, 200, 300, 500, 1000, 2000], 150],
    gradients: [["gradients {0} MB", "梯度 {0} MB"], [20, 50, 100, 200, 440, 1000, 2800, 28000], 100],
    network: [["network {0} Gbit/s per machine", "每台机器网络 {0} Gbit/s"], [1, 10, 25, 100, 200, 400, 800, 3200], 100],
    inside: [["inside a machine {0} GB/s", "机器内 {0} GB/s"], [10, 25, 60, 240, 450], 240],
  },
};
const DEFAULTS = Object.fromEntries(Object.values(KNOBS).flatMap((rows) => Object.entries(rows).map(([key, row]) => [key, row[2]])));
const chosen = { ...DEFAULTS };

// ResNet-50 is as in tools/fit.py --arch and on the H200 of docs/performance.md, the memory of 7 B as in
// tools/fit.py --help. The activations of 124 M and the step times of both GPTs are estimates.
const PRESETS = {
  fit: {
    "ResNet-50": { weights: 25.6, activations: 44, batch: 256, gpus: 8, memory: 80 },
    "GPT 124 M": { weights: 124, activations: 630, batch: 32, gpus: 8, memory: 40 },
    "7 B": { weights: 7000, activations: 900, batch: 4, gpus: 64, memory: 80 },
  },
  scale: {
    "ResNet-50": { step: 56, gradients: 102, network: 100, inside: 240 },
    "GPT 124 M": { step: 160, gradients: 498, network: 100, inside: 240 },
    "7 B": { step: 1700, gradients: 28000, network: 3200, inside: 450 },
  },
};

// Draw a slider for each setting of a scene. A value may be between its steps.
function drawKnobs(parent, name, update) {
  for (const [key, [label, steps]] of Object.entries(KNOBS[name])) {
    const nearest = steps.reduce((best, step, k) => (Math.abs(step - chosen[key]) < Math.abs(steps[best] - chosen[key]) ? k : best), 0);
    const text = () => say(label, [chosen[key]]);
    const caption = make("span", null, { textContent: text() });
    const input = make("input", null, { type: "range", min: 0, max: steps.length - 1, value: nearest });
    input.disabled = state.option === "fsdp" && key === "bucket"; // FSDP sends blocks
    input.oninput = () => {
      chosen[key] = steps[input.value];
      caption.textContent = text();
      update();
    };
    input.onpointerup = () => input.blur(); // the arrow keys then step again
    make("label", parent, {}, caption, input);
  }
}

function drawCalculator(name) {
  const parent = $("calculator");
  const fits = name === "fit";
  const presets = make("p", null, { className: "presets" }, `${say(PAGE.presets)} `);
  for (const [label, values] of Object.entries(PRESETS[name])) {
    make("button", presets, { type: "button", textContent: label, onclick: () => drawPage(Object.assign(chosen, values)) });
  }
  const chart = make("div");
  const command = make("code");
  parent.replaceChildren(presets, chart, make("p", null, {}, `${say(PAGE.command)} `, command));
  const update = () => {
    chart.replaceChildren();
    (fits ? drawMemory : drawEfficiency)(chart);
    const c = chosen;
    command.textContent = fits
      ? `python tools/fit.py --weights-m ${c.weights} --activations-mb-per-image ${c.activations} --optimizer adam --amp bf16 --batch-size ${c.batch} --gpus ${c.gpus} --memory-gb ${c.memory}`
      : `python tools/plan.py --gpus 64 --step-ms ${c.step} --gradients-mb ${c.gradients} --network-gbit ${c.network} --inside-gbytes ${c.inside}`;
    saveHash();
  };
  drawKnobs($("knobs"), name, update);
  update();
}

const fitSetting = () => ({ machine: 8, blocks: 32, optimizer: "adam", bf16: true, gpus: chosen.gpus, batch: chosen.batch, weights: 1e6 * chosen.weights, activations: 1e6 * chosen.activations, memory: GB * chosen.memory });
const scaleSetting = (gpus) => ({ machine: 8, gpus, step: chosen.step / 1000, gradients: 1e6 * chosen.gradients, network: (GB * chosen.network) / 8, inside: GB * chosen.inside });

// A bar for each way to train, of the parts of its memory, and the line that it must not pass.
function drawMemory(parent) {
  const s = fitSetting();
  const rows = fit(s);
  const limit = 0.9 * s.memory;
  const widest = Math.min(4 * limit, Math.max(1.25 * limit, ...rows.map(({ sum }) => sum)));
  const share = (bytes) => `${(100 * bytes) / widest}%`;
  const legend = make("p", parent, { className: "parts" });
  PAGE.fit.parts.forEach((text, k) => make("span", legend, { className: `part${k}`, textContent: say(text) }));
  for (const { name, parts, sum } of rows) {
    const row = make("div", parent, { className: sum > limit ? "memory no" : "memory" });
    make("span", row, { textContent: name });
    const bar = make("div", row, { className: "stack" });
    parts.forEach((bytes, k) => (make("i", bar, { className: `part${k}` }).style.width = share(bytes)));
    make("u", bar).style.left = share(limit);
    make("b", row, { textContent: `${(sum / GB).toFixed(2)} GB ${sum > limit ? "✗" : "✓"}` });
  }
}

// The band of efficiency by number of GPUs.
function drawEfficiency(parent) {
  const width = parent.clientWidth;
  const height = 300;
  const chart = svg("svg", parent, { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": say(PAGE.scale.title) });
  const counts = [...Array(41).keys()].map((k) => Math.round(2 ** (k / 4)));
  const x = (gpus) => 44 + (Math.log2(gpus) / 10) * (width - 70);
  const y = (part) => height - 26 - part * (height - 46);
  const bands = counts.map((gpus) => [gpus, ...scale(scaleSetting(gpus))]);
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    svg("line", chart, { x1: x(1), x2: x(1024), y1: y(part), y2: y(part), class: "tick" });
    svg("text", chart, { x: 38, y: y(part) + 4, "text-anchor": "end" }, `${100 * part} %`);
  }
  const points = (column) => bands.map((band) => `${x(band[0])},${y(band[column])}`);
  svg("polygon", chart, { points: [...points(1), ...points(2).reverse()].join(" "), class: "band" });
  for (const column of [1, 2]) svg("polyline", chart, { points: points(column).join(" "), class: "edge" });
  for (const gpus of [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]) {
    svg("text", chart, { x: x(gpus), y: height - 6, "text-anchor": "middle" }, gpus);
    const band = scale(scaleSetting(gpus));
    if ([8, 64, 512].includes(gpus)) band.forEach((part, k) => svg("text", chart, { x: x(gpus), y: y(part) + (k ? -7 : 16), class: "name", "text-anchor": "middle" }, `${Math.round(100 * part)} %`));
  }
}
