// Training steps in time: discrete events, without a page. The tests compare them with runs.js, and
// their seconds with tools/planning/step_model.py.

const MIB = 2 ** 20;

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

// An all-gather or a reduce-scatter is half an all-reduce.
const seconds = (kind, size, s) => allReduce(size, s.ranks, s) / (kind === "all_reduce" ? 1 : 2);

const mean = (values) => values[0].map((_, k) => values.reduce((sum, value) => sum + value[k], 0) / values.length);

// What a rank gets from a collective, of the values of all ranks.
const RESULT = {
  barrier: () => null,
  all_reduce: mean,
  all_gather: (values) => values.flat(),
  reduce_scatter: (values, rank) => {
    const size = values[0].length / values.length;
    return mean(values).slice(rank * size, (rank + 1) * size);
  },
};

// Run a program for each rank: a generator of
//   {kind, compute}           computes for so many seconds
//   {start, size, value}      joins the next collective and goes on; gets its number
//   {wait: [numbers]}         waits for collectives; gets their results
//   {send, value}, {receive}  a message to and from a rank
// The ranks' calls are numbered. A collective begins when all ranks have made the call of its number
// and the call before has ended. If the calls of a number differ, it never begins.
function simulate(programs, s) {
  const calls = [];
  const blocks = []; // what a rank does: {rank, kind, from, to}
  const events = []; // the kinds of runs.js
  const mail = {};
  const ranks = programs.map((program, rank) => ({ rank, program, clock: 0, made: 0, dies: s.dies?.[rank] ?? Infinity }));

  function join(one, op) {
    const call = (calls[one.made] ??= { number: one.made, kind: op.start, of: op.of, names: [], joined: [], values: [] });
    one.made += 1;
    call.differs ||= call.kind !== op.start;
    call.names[one.rank] = `${op.start} ${one.made}`;
    call.joined[one.rank] = one.clock;
    call.values[one.rank] = op.value;
    if (!call.differs && call.joined.filter((time) => time !== undefined).length === ranks.length) {
      call.from = Math.max(...call.joined, calls[call.number - 1]?.to ?? 0);
      call.to = call.from + seconds(op.start, op.size, s);
    }
    return call.number;
  }

  // Do the next operation of a rank. Return whether it could.
  function advance(one) {
    one.op ??= one.program.next(one.result).value;
    const { rank, op } = one;
    const tell = (kind, more) => events.push({ rank, time: one.clock, kind, ...more });
    const tellOnce = (...what) => (op.told ||= tell(...what));
    const block = (kind, to) => {
      blocks.push({ ...op, rank, kind, from: one.clock, to: Math.min(to, one.dies) });
      one.clock = Math.min(to, one.dies);
    };
    if (!op || one.clock >= one.dies) return false;
    one.result = undefined;
    if ("compute" in op) {
      block(op.kind, one.clock + op.compute);
      if (op.event && one.clock < one.dies) tell(op.event, { of: op.of });
    } else if (op.start) {
      one.result = join(one, op);
      if (op.event) tell(op.event, { of: op.of, calls: [`${op.start} ${one.made}`], value: op.value });
    } else if (op.wait) {
      const awaited = op.wait.map((number) => calls[number]);
      const named = { calls: awaited.map((call) => call.names[rank]) };
      tellOnce("wait", named);
      if (awaited.some((call) => call.to === undefined)) return false;
      block("wait", Math.max(one.clock, ...awaited.map((call) => call.to)));
      one.result = awaited.map((call) => s.values && RESULT[call.kind](call.values, rank));
      tell("done", { ...named, value: one.result });
    } else if ("send" in op) {
      (mail[`${rank} ${op.send}`] ??= []).push([one.clock + seconds("message", op.size, s), op.value]);
      tell("send", { to: op.send, value: op.value });
    } else {
      tellOnce("receive", { source: op.receive });
      const letter = mail[`${op.receive} ${rank}`]?.shift();
      if (!letter) return false;
      block("wait", Math.max(one.clock, letter[0]));
      one.result = letter[1];
      tell("done", { value: [letter[1]] });
    }
    one.op = null;
    return true;
  }

  while (ranks.some(advance));
  const end = Math.max(...ranks.map((one) => one.clock));
  const stuck = ranks.filter((one) => one.op?.wait || "receive" in (one.op ?? {}));
  return { blocks, calls, events, end, stuck: stuck.map(({ rank, clock, op }) => ({ rank, from: clock, ...op })) };
}

// Return the layers of each bucket, the last layer first. As in DDP, a bucket is full when it has
// reached its size, and the first one is small, so that sending starts early.
function bucketsOf(s) {
  const buckets = [[]];
  for (let layer = s.layers; layer >= 1; layer--) {
    const size = (buckets.at(-1).length * s.gradients) / s.layers;
    if (size >= (buckets.length > 1 ? s.bucket : Math.min(s.bucket, MIB))) buckets.push([]);
    buckets.at(-1).push(layer);
  }
  return buckets;
}

// A rank of DDP: s.steps training steps of s.micro micro-batches. s.values: what it gives to each call.
function* ddpProgram(rank, s) {
  for (let step = 0; step < s.steps; step++) {
    yield { kind: "read", compute: s.late?.[rank] ?? 0 };
    for (let micro = 0; micro < s.micro; micro++) {
      yield { kind: "forward", compute: s.forward, micro, again: step > 0 };
      const calls = [];
      for (const of of bucketsOf(s)) {
        for (const layer of of) {
          yield { kind: "backward", compute: s.backward / s.layers, micro, again: step > 0, of: [layer], event: "gradient" };
        }
        if (s.sends === "never" || (s.sends === "last" && micro + 1 < s.micro)) continue;
        const size = (of.length * s.gradients) / s.layers;
        calls.push(yield { start: "all_reduce", size, of, event: "bucket", value: s.values?.[rank].shift() });
      }
      if (calls.length) yield { wait: calls, micro };
    }
    yield { kind: "optimizer", compute: s.optimizer };
    if (s.barrier && rank === 0) yield { wait: [yield { start: "barrier", size: 0 }], kind: "barrier" };
  }
}

// A rank of FSDP: blocks are gathered, in both passes, and gradients are scattered. With s.blocking,
// as with gloo, a call returns when it has ended, so that the forward pass gathers nothing ahead.
function* fsdpProgram(rank, s) {
  const gathered = {};
  const scattered = [];
  function* start(kind, block) {
    const size = s.gradients / s.layers;
    const number = yield { start: kind, size, of: [block], value: s.values?.[rank].shift() };
    if (s.blocking) yield { wait: [number] };
    return number;
  }
  yield { kind: "read", compute: s.late?.[rank] ?? 0 };
  for (let micro = 0; micro < s.micro; micro++) {
    for (let block = 1; block <= s.layers; block++) {
      gathered[block] ??= yield* start("all_gather", block);
      if (!s.blocking && block < s.layers) gathered[block + 1] = yield* start("all_gather", block + 1);
      if (!s.blocking) yield { wait: [gathered[block]], micro, line: "forward" };
      yield { kind: "forward", compute: s.forward / s.layers, micro, of: [block], event: "compute" };
      delete gathered[block];
    }
    for (let block = s.layers; block >= 1; block--) {
      gathered[block] ??= yield* start("all_gather", block);
      if (block > 1) gathered[block - 1] = yield* start("all_gather", block - 1);
      if (!s.blocking) yield { wait: [gathered[block]], micro };
      yield { kind: "backward", compute: s.backward / s.layers, micro, of: [block], event: "gradient" };
      delete gathered[block];
      scattered.push(yield* start("reduce_scatter", block));
    }
  }
  if (!s.blocking) yield { wait: scattered };
  yield { kind: "optimizer", compute: s.optimizer / s.ranks };
}

// A rank of a ring all-reduce by messages, each of one piece of its tensor.
function* ringProgram(rank, s) {
  const n = s.ranks;
  const pieces = s.values[rank];
  const at = (k) => (k + 2 * n) % n;
  for (let round = 0; round < n - 1; round++) {
    yield { send: at(rank + 1), value: pieces[at(rank - round)], size: s.size };
    pieces[at(rank - round - 1)] += yield { receive: at(rank - 1) };
  }
  for (let round = 0; round < n - 1; round++) {
    yield { send: at(rank + 1), value: pieces[at(rank + 1 - round)], size: s.size };
    pieces[at(rank - round)] = yield { receive: at(rank - 1) };
  }
}

const PROGRAMS = { ddp: ddpProgram, fsdp: fsdpProgram, ring: ringProgram };

function trace(name, s) {
  return simulate([...Array(s.ranks).keys()].map((rank) => PROGRAMS[name](rank, s)), s);
}
