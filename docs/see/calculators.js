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

// Return the seconds of an all-reduce of so many bytes: a ring or a tree, the faster.
function allReduce(size, gpus, s) {
  if (gpus === 1) return 0;
  const inside = Math.min(s.machine, gpus);
  const machines = Math.ceil(gpus / inside);
  const bandwidth = machines === 1 ? s.inside : Math.min(s.network, s.inside);
  const hops = (2 * (gpus - machines) * 3 + 2 * (machines - 1) * 7) * 1e-6;
  const ring = hops + ((2 * (gpus - 1)) / gpus) * (size / bandwidth);
  const steps = 2 * ((inside - 1) * 3 + Math.log2(machines) * 7) * 1e-6;
  return 10e-6 + Math.min(ring, steps + (2 * size) / (0.9 * bandwidth));
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

// The page of the calculators

const GB = 1e9;
const SLIDERS = {
  fit: {
    weights: [["million weights", "参数量（百万）"], [10, 20, 50, 100, 300, 1000, 3000, 7000, 13000], 4, 1e6],
    activations: [["MB of activations per image", "每张图像的激活值（MB）"], [20, 50, 100, 200, 400, 900, 2000], 3, 1e6],
    batch: [["images per GPU", "每块 GPU 的图像数"], [1, 2, 4, 8, 16, 32, 64, 128, 256], 5, 1],
    gpus: [["GPUs", "GPU 数"], [1, 2, 4, 8, 16, 32, 64, 128], 3, 1],
    memory: [["GB of memory of a GPU", "每块 GPU 的显存（GB）"], [8, 12, 16, 24, 40, 48, 80, 141], 3, GB],
  },
  scale: {
    step: [["ms for a step of one GPU", "单块 GPU 的训练步（毫秒）"], [20, 50, 100, 150, 200, 300, 500, 1000], 3, 1e-3],
    gradients: [["MB of gradients", "梯度（MB）"], [20, 50, 100, 200, 440, 1000, 2800], 2, 1e6],
    network: [["Gbit/s of a machine's network", "每台机器的网络（Gbit/s）"], [1, 10, 25, 100, 200, 400, 800, 3200], 3, GB / 8],
    inside: [["GB/s between the GPUs of a machine", "机器内 GPU 之间（GB/s）"], [10, 25, 60, 240, 450], 3, GB],
  },
};
const chosen = {};
for (const [name, rows] of Object.entries(SLIDERS)) {
  chosen[name] = Object.fromEntries(Object.entries(rows).map(([key, row]) => [key, row[2]]));
}

function drawCalculators(language) {
  const say = (texts) => texts[language === "zh" ? 1 : 0];
  for (const name of Object.keys(SLIDERS)) {
    const section = document.getElementById(name);
    section.replaceChildren();
    make("h2", section, { textContent: say(PAGE[name].title) });
    make("p", section, { textContent: say(PAGE[name].about) });
    const sliders = make("div", section, { className: "calculator" });
    const result = make("div", section, { className: "wide" });
    const update = () => result.replaceChildren(name === "fit" ? fitTable(say) : scaleTable(say));
    for (const [key, [label, steps, , unit]] of Object.entries(SLIDERS[name])) {
      const text = () => `${say(label)}: ${steps[chosen[name][key]]}`;
      const caption = make("span", null, { textContent: text() });
      const input = make("input", null, { type: "range", min: 0, max: steps.length - 1, value: chosen[name][key] });
      input.oninput = () => {
        chosen[name][key] = Number(input.value);
        caption.textContent = text();
        update();
      };
      make("label", sliders, {}, caption, input);
    }
    update();
  }
}

function setting(name) {
  const pairs = Object.entries(SLIDERS[name]).map(([key, row]) => [key, row[1][chosen[name][key]] * row[3]]);
  return { machine: 8, blocks: 32, optimizer: "adam", bf16: true, ...Object.fromEntries(pairs) };
}

function tableOf(head, rows) {
  const table = make("table");
  make("tr", table, {}, ...head.map((text) => make("th", null, { textContent: text })));
  for (const [cells, no] of rows) {
    make("tr", table, { className: no ? "no" : "" }, ...cells.map((text) => make("td", null, { textContent: text })));
  }
  return table;
}

function fitTable(say) {
  const s = setting("fit");
  const rows = fit(s).map(({ name, parts, sum }) => {
    const fits = sum <= 0.9 * s.memory;
    return [[name, ...[...parts, sum].map((bytes) => (bytes / GB).toFixed(1)), say(fits ? ["yes", "是"] : ["no", "否"])], !fits];
  });
  return tableOf(PAGE.fit.head.map(say), rows);
}

function scaleTable(say) {
  const rows = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024].map((gpus) => {
    const band = scale({ ...setting("scale"), gpus });
    return [[gpus, ...band.map((share) => `${(100 * share).toFixed(0)} %`), ...band.map((share) => (gpus * share).toFixed(1))]];
  });
  return tableOf(PAGE.scale.head.map(say), rows);
}
