'use strict';

// The data of one recording: columns of numbers in LEB128, one after the other. `data.rs` writes them.
function decode(about, bytes) {
  const { changes, blocks } = about;
  let begin = 0;
  const columns = about.columns.map((length) => {
    const column = reader(bytes, begin);
    begin += length;
    return column;
  });
  const [times, which, origins, sizes, devices, addresses] = columns;
  const data = {
    about,
    time: new Float64Array(changes),
    delta: new Float64Array(changes),
    block: new Uint32Array(changes),
    born: new Uint32Array(blocks),
    died: new Uint32Array(blocks).fill(LIVE),
    bytes: new Float64Array(blocks),
    origin: new Uint32Array(blocks),
    device: new Uint16Array(blocks),
    // PyTorch's blocks have addresses.
    address: about.columns[5] > 0 ? new Float64Array(blocks) : undefined,
    // The remaining bytes of partly freed blocks: block → [[change, bytes], …].
    shrunk: new Map(),
  };
  const left = new Map();
  const knownAddresses = [];
  let time = 0;
  let known = 0;
  for (let change = 0; change < changes; change++) {
    time += times();
    data.time[change] = time;
    const code = which();
    if (code === 0) {
      const size = sizes();
      data.block[change] = known;
      data.delta[change] = size;
      data.born[known] = change;
      data.bytes[known] = size;
      data.origin[known] = origins();
      data.device[known] = devices();
      if (data.address) {
        const number = addresses();
        if (number === knownAddresses.length) knownAddresses.push(addresses());
        data.address[known] = knownAddresses[number];
      }
      known++;
      continue;
    }
    const isPart = code % 2 === 0;
    const block = known - 1 - Math.floor((code - 1) / 2);
    const size = left.get(block) ?? data.bytes[block];
    data.block[change] = block;
    if (isPart) {
      const rest = sizes();
      left.set(block, rest);
      if (!data.shrunk.has(block)) data.shrunk.set(block, []);
      data.shrunk.get(block).push([change, rest]);
      data.delta[change] = rest - size;
    } else {
      data.died[block] = change;
      data.delta[change] = -size;
    }
  }
  return data;
}

const LIVE = 0xffffffff;

function reader(bytes, at) {
  return () => {
    let byte = bytes[at++];
    if (byte < 0x80) return byte;
    let number = byte & 0x7f;
    let scale = 128;
    do {
      byte = bytes[at++];
      number += (byte & 0x7f) * scale;
      scale *= 128;
    } while (byte >= 0x80);
    return number;
  };
}

async function inflate(text) {
  const signs = atob(text);
  // `Uint8Array.from` is many times slower.
  const compressed = new Uint8Array(signs.length);
  for (let at = 0; at < signs.length; at++) compressed[at] = signs.charCodeAt(at);
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Returns the first position for which `isAfter` is true.
function search(length, isAfter) {
  let low = 0;
  let high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (isAfter(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

const NAMES = {
  kind: (origin) => origin.kind,
  scope: (origin) => origin.scope.join(' > ') || 'outside of all scopes',
  outer: (origin) => origin.scope[0] ?? 'outside of all scopes',
  library: (origin) => origin.library,
  place: (origin) => origin.place,
};

const COLOURS = [
  '#4e79a7', '#f28e2b', '#59a14f', '#e15759', '#76b7b2', '#edc948', '#b07aa1', '#ff9da7', '#9c755f',
  '#2d6a74', '#d37295', '#8cd17d', '#b6992d', '#a0cbe8', '#fabfd2', '#d4a6c8', '#7a3b69', '#79706e',
];
// The colour of the groups that are counted together.
const OTHERS = '#c0c6cc';
const MOST_GROUPS = COLOURS.length;
const STEP = 256;
const LEVELS = [64, 4096];

// The pools that can be chosen: the memory of a device, and memory that belongs to it but may be elsewhere. For PyTorch, only tensors can
// be chosen: its segments are shown as a line above them.
function pools(data) {
  const { about, device, origin } = data;
  const known = new Set();
  for (let block = 0; block < device.length; block++) {
    known.add(device[block] * 2 + Number(about.origins[origin[block]].isOnDevice));
  }
  return about.devices.flatMap(({ name, model }, number) => [
    { device: number, isOnDevice: true, name: model ? `${name} (${model})` : name },
    { device: number, isOnDevice: false, name: `${name}: managed and pinned host memory` },
  ]).filter((pool) => known.has(pool.device * 2 + Number(pool.isOnDevice)) && (pool.isOnDevice || !about.allocator));
}

// The groups of one pool that have separate curves: those with the highest peaks, the highest first. The other groups share one curve.
function groupsOf(data, pool, by) {
  const { about, block, delta, device, origin } = data;
  const names = about.origins.map(NAMES[by]);
  const numbers = new Map();
  const numberOf = about.origins.map((of, number) => {
    if (of.isOnDevice !== pool.isOnDevice) return -1;
    if (!numbers.has(names[number])) numbers.set(names[number], numbers.size);
    return numbers.get(names[number]);
  });
  const now = new Float64Array(numbers.size);
  const most = new Float64Array(numbers.size);
  for (let change = 0; change < block.length; change++) {
    const group = device[block[change]] === pool.device ? numberOf[origin[block[change]]] : -1;
    if (group < 0) continue;
    now[group] += delta[change];
    if (now[group] > most[group]) most[group] = now[group];
  }
  const order = [...most.keys()].filter((group) => most[group] > 0).sort((a, b) => most[b] - most[a]);
  const texts = [...numbers.keys()];
  const shown = order.length > MOST_GROUPS ? order.slice(0, MOST_GROUPS - 1) : order;
  const place = new Map(shown.map((group, at) => [group, at]));
  return {
    shown: shown.map((group) => texts[group]),
    others: order.length - shown.length,
    // The group of each origin. It is −1 outside of the pool.
    groupOf: numberOf.map((group) => (group < 0 ? -1 : place.get(group) ?? shown.length)),
  };
}

// Gives a colour to each name that has none. The names of one curve have different colours, unless two of them got the same colour in other
// curves.
function giveColours(colours, names) {
  const used = new Set(names.map((name) => colours.get(name)));
  const free = COLOURS.filter((colour) => !used.has(colour));
  for (const name of names) if (!colours.has(name)) colours.set(name, free.shift());
}

// The curves of one pool: one for each group, with levels of detail of their sum.
function series(data, pool, by) {
  const { block, delta, device, origin } = data;
  const changes = block.length;
  const { shown, others, groupOf } = groupsOf(data, pool, by);
  const groups = others > 0 ? [...shown, `(${others} others)`] : shown;
  const groupAt = (change) => (device[block[change]] === pool.device ? groupOf[origin[block[change]]] : -1);
  // The sum after each change, the groups before each 256th, and the positions of the smallest and the largest sum in each part.
  const sum = new Float64Array(changes);
  const steps = [];
  const live = new Float64Array(groups.length);
  let total = 0;
  let peakAt = -1;
  for (let change = 0; change < changes; change++) {
    if (change % STEP === 0) steps.push(live.slice());
    const group = groupAt(change);
    if (group >= 0) {
      live[group] += delta[change];
      total += delta[change];
    }
    sum[change] = total;
    if (total > (peakAt < 0 ? 0 : sum[peakAt])) peakAt = change;
  }
  const levels = [];
  for (const length of LEVELS) {
    const below = levels.at(-1);
    const count = Math.ceil(changes / length);
    const level = { length, least: new Uint32Array(count), most: new Uint32Array(count) };
    for (let part = 0; part < count; part++) {
      const first = part * length;
      const end = Math.min(changes, first + length);
      let [least, most] = [first, first];
      const look = (at, other) => {
        if (sum[at] < sum[least]) least = at;
        if (sum[other] > sum[most]) most = other;
      };
      if (below) {
        for (let at = first / below.length; at * below.length < end; at++) look(below.least[at], below.most[at]);
      } else {
        for (let at = first; at < end; at++) look(at, at);
      }
      level.least[part] = least;
      level.most[part] = most;
    }
    levels.push(level);
  }
  // Returns the bytes of each group after a change; −1 is the start.
  const valuesAfter = (change) => {
    if (change < 0) return new Float64Array(groups.length);
    const values = steps[Math.floor(change / STEP)].slice();
    for (let at = change - (change % STEP); at <= change; at++) {
      const group = groupAt(at);
      if (group >= 0) values[group] += delta[at];
    }
    return values;
  };
  // Returns the positions of the smallest and the largest sum among the changes from `first` up to `end`.
  const extremes = (first, end) => {
    let [least, most] = [first, first];
    const look = (at, other) => {
      if (sum[at] < sum[least]) least = at;
      if (sum[other] > sum[most]) most = other;
    };
    for (let at = first; at < end; ) {
      const level = levels.findLast(({ length }) => at % length === 0 && at + length <= end);
      if (level) {
        look(level.least[at / level.length], level.most[at / level.length]);
        at += level.length;
      } else {
        look(at, at);
        at++;
      }
    }
    return [least, most];
  };
  return { data, pool, groups, groupOf, sum, peakAt, valuesAfter, extremes, isIn: (change) => groupAt(change) >= 0 };
}

// Returns the time before which the live memory is not known.
function unknownUntil(data, pool) {
  return data.about.devices[pool.device].knownFrom ?? data.about.knownFrom ?? -1;
}

// Returns how much of the live memory the recording contains between `begin` and `end`: all of it, that at the peak, or nothing.
function knownIn(data, { pool, peakAt }, begin, end) {
  if (!data.about.hasOnlyPeaks) return end > unknownUntil(data, pool) ? 'all' : 'nothing';
  if (end > data.about.end) return 'all';
  // A peak counts the device's memory.
  const peak = pool.isOnDevice && peakAt >= 0 ? data.time[peakAt] : -1;
  return begin <= peak && peak < end ? 'peak' : 'nothing';
}

// Returns the last change up to a time; −1 if there is none.
function changeAt(data, time) {
  return search(data.time.length, (at) => data.time[at] > time) - 1;
}

function bytesAfter(data, block, change) {
  const parts = data.shrunk.get(block);
  if (!parts) return data.bytes[block];
  const after = search(parts.length, (at) => parts[at][0] > change);
  return after > 0 ? parts[after - 1][1] : data.bytes[block];
}

// Returns the live memory after a change, by origin: [bytes, blocks].
function heldAfter(data, pool, change) {
  const { born, died, origin, device, about } = data;
  const held = new Map();
  const end = search(born.length, (block) => born[block] > change);
  for (let block = 0; block < end; block++) {
    if (died[block] <= change || device[block] !== pool.device) continue;
    if (about.origins[origin[block]].isOnDevice !== pool.isOnDevice) continue;
    const sum = held.get(origin[block]) ?? [0, 0];
    sum[0] += bytesAfter(data, block, change);
    sum[1] += 1;
    held.set(origin[block], sum);
  }
  return held;
}

// Returns PyTorch's segments after a change, the largest first, each with its tensors in the order of their addresses.
function segmentsAfter(data, { device: number }, change) {
  const { about, address, born, died, device, origin } = data;
  const [segments, tensors] = [[], []];
  const end = search(born.length, (block) => born[block] > change);
  for (let block = 0; block < end; block++) {
    if (died[block] <= change || device[block] !== number) continue;
    const of = { block, begin: address[block], end: address[block] + bytesAfter(data, block, change) };
    (about.origins[origin[block]].isOnDevice ? tensors : segments).push(of);
  }
  const byAddress = (a, b) => a.begin - b.begin;
  tensors.sort(byAddress);
  const joined = [];
  for (const { begin, end: last } of segments.sort(byAddress)) {
    const before = joined.at(-1);
    if (about.devices[number].isExpandable && before?.end === begin) before.end = last;
    else joined.push({ begin, end: last, tensors: [] });
  }
  let at = 0;
  for (const segment of joined) {
    while (at < tensors.length && tensors[at].begin < segment.begin) at++;
    while (at < tensors.length && tensors[at].begin < segment.end) segment.tensors.push(tensors[at++]);
  }
  return joined.sort((a, b) => b.end - b.begin - (a.end - a.begin) || a.begin - b.begin);
}

// Adds the live memory of an origin to the sum of several origins. A sum has a colour if all of it has this colour, and is marked as found
// if a part of it was found.
function addTo(sum, [bytes, blocks], colour, isFound) {
  sum.colour = sum.blocks === 0 || sum.colour === colour ? colour : undefined;
  sum.bytes += bytes;
  sum.blocks += blocks;
  sum.isFound ||= isFound;
}

// Returns nested frames, each with its live memory: all functions, or only those that show the purpose of the memory.
function flameOf(data, held, hasAll = false, colours = [], found = undefined) {
  const root = { name: 'all', bytes: 0, blocks: 0, inside: new Map() };
  for (const [origin, live] of held) {
    const add = (node) => addTo(node, live, colours[origin], !found || found[origin]);
    let node = root;
    add(node);
    const { frames, calls } = data.about.origins[origin];
    for (const frame of hasAll ? frames : calls) {
      if (!node.inside.has(frame)) {
        node.inside.set(frame, { name: data.about.frames[frame], bytes: 0, blocks: 0, inside: new Map() });
      }
      node = node.inside.get(frame);
      add(node);
    }
  }
  return root;
}

// Returns the places of the live memory of each kind, the largest first.
function placesOf(data, held, colours = []) {
  const places = new Map();
  for (const [number, live] of held) {
    const origin = data.about.origins[number];
    const scope = origin.scope.length ? `${origin.scope.join(' > ')}: ` : '';
    const name = scope + origin.place + (origin.caller ? `, from ${origin.caller}` : '');
    const key = `${name}\n${origin.kind}`;
    if (!places.has(key)) places.set(key, { name, kind: origin.kind, bytes: 0, blocks: 0 });
    addTo(places.get(key), live, colours[number]);
  }
  return [...places.values()].sort((a, b) => b.bytes - a.bytes);
}

// Returns, for each origin, whether one of its names on the page contains a text.
function foundIn(about, text, hasAll) {
  const wanted = text.toLowerCase();
  const has = (name) => name.toLowerCase().includes(wanted);
  const frames = about.frames.map(has);
  return about.origins.map(
    ({ scope, place, caller, library, kind, frames: all, calls }) =>
      (hasAll ? all : calls).some((frame) => frames[frame]) || [...scope, place, caller ?? '', library, kind].some(has),
  );
}

// Returns the largest blocks between two changes, each with the lowest offset at which there is no other block during its life.
function bandsOf(data, pool, first, last, most) {
  const { born, died, bytes, origin, device, about } = data;
  const end = search(born.length, (block) => born[block] > last);
  const isIn = (block) =>
    died[block] > first && device[block] === pool.device && about.origins[origin[block]].isOnDevice === pool.isOnDevice;
  let count = 0;
  // The smallest size that is shown is found by counting sizes in powers of 2, then exactly.
  const counts = new Uint32Array(64);
  for (let block = 0; block < end; block++) {
    if (!isIn(block)) continue;
    count++;
    counts[bytes[block] > 1 ? Math.floor(Math.log2(bytes[block])) : 0]++;
  }
  let power = 63;
  for (let above = 0; power > 0 && above + counts[power] < most; power--) above += counts[power];
  const chosen = [];
  for (let block = 0; block < end; block++) if (isIn(block) && (bytes[block] >= 2 ** power || power === 0)) chosen.push(block);
  chosen.sort((a, b) => bytes[b] - bytes[a] || born[a] - born[b]);
  chosen.length = Math.min(chosen.length, most);
  chosen.sort((a, b) => born[a] - born[b]);
  const bands = [];
  let height = 0;
  let open = [];
  for (const block of chosen) {
    // The blocks are sorted by their offsets.
    open = open.filter((band) => died[band.block] > born[block]);
    let offset = 0;
    for (const band of open) {
      if (band.offset - offset >= bytes[block]) break;
      offset = Math.max(offset, band.offset + bytes[band.block]);
    }
    const band = { block, offset };
    open.splice(search(open.length, (at) => open[at].offset > offset), 0, band);
    bands.push(band);
    height = Math.max(height, offset + bytes[block]);
  }
  return { bands, height, left: count - chosen.length };
}

function bytesInWords(bytes) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  let amount = Math.abs(bytes);
  while (amount >= 1024 && unit < units.length - 1) {
    amount /= 1024;
    unit++;
  }
  const text = unit === 0 ? String(amount) : amount.toPrecision(Math.max(3, String(Math.floor(amount)).length));
  return `${bytes < 0 ? '-' : ''}${text.includes('.') ? text.replace(/\.?0+$/, '') : text} ${units[unit]}`;
}

// Names can be as long as a page. The end of a path is its most useful part.
function shortened(text, most = 160) {
  const signs = [...text];
  if (signs.length <= most) return text;
  const first = Math.floor(most / 3);
  return `${signs.slice(0, first).join('')}…${signs.slice(first + 1 - most).join('')}`;
}

// Returns the file that a command runs, as `gpumem run` names the recording, without its folders.
function programOf(command) {
  return (command.find((word) => /\.(py|sh)$/.test(word)) ?? command[0])?.split('/').at(-1);
}

// Returns the names of files without their common parts between dots at the start and at the end.
function different(names) {
  const parts = names.map((name) => name.split('.'));
  const isCommon = (at) => parts.every((of) => of.length > 1 && of.at(at) === parts[0].at(at));
  while (isCommon(0)) parts.forEach((of) => of.shift());
  while (isCommon(-1)) parts.forEach((of) => of.pop());
  return parts.map((of) => of.join('.'));
}

function countInWords(count, what) {
  return `${count.toLocaleString('en')} ${what}${count === 1 ? '' : 's'}`;
}

function timeInWords(nanos, step = nanos) {
  const [scale, unit] = step < 1e3 ? [1, 'ns'] : step < 1e6 ? [1e3, 'µs'] : step < 1e9 ? [1e6, 'ms'] : [1e9, 's'];
  const decimals = Math.max(0, Math.min(9, 3 - Math.floor(Math.log10(Math.max(step / scale, 1e-9)))));
  // The number is cut off, as in the reports. The small addend compensates the loss of a division.
  const text = (Math.floor((nanos / scale) * 10 ** decimals + 1e-6) / 10 ** decimals).toFixed(decimals);
  return `${text.includes('.') ? text.replace(/\.?0+$/, '') : text} ${unit}`;
}

// Returns the highest value of the curve of a recording between two times; null if it is not known, or after its end.
function mostBetween({ curve, end }, from, to) {
  if (from >= end) return null;
  const first = Math.floor((from / end) * curve.length);
  const last = Math.max(first + 1, Math.min(curve.length, Math.ceil((to / end) * curve.length)));
  let most = null;
  for (let at = first; at < last; at++) if (curve[at] !== null && (most === null || curve[at] > most)) most = curve[at];
  return most;
}

// Returns the lowest, the median and the highest value of all recordings in equal parts of the time.
function overTime(recordings, lastEnd, parts = 300) {
  return Array.from({ length: parts }, (_, part) => {
    const values = recordings.map((recording) => mostBetween(recording, (part * lastEnd) / parts, ((part + 1) * lastEnd) / parts));
    const known = values.filter((bytes) => bytes !== null).sort((a, b) => a - b);
    return [known[0], known[Math.floor(known.length / 2)], known.at(-1)].map((bytes) => bytes ?? null);
  });
}

// The colours go from blue to red. A smaller value is paler.
function heat(part) {
  const high = Math.max(0, (part - 0.6) / 0.4);
  const mixed = [[78, 179], [121, 38], [167, 30]].map(([low, top]) => low + (top - low) * high);
  return [...mixed, 40 + 215 * Math.min(1, part / 0.6)];
}

// The page starts here.
function start() {
  const $ = (id) => document.getElementById(id);
  const about = JSON.parse($('about-data').textContent);
  // The elements by their ids.
  const loaded = {};
  // The blocks that are shown: the driver's blocks, or PyTorch's tensors.
  let data;
  let curves;
  // The data of the recording: its tensors, if it has any, then its blocks.
  let sources = [];
  // The colour of each name, for each way to group. A name keeps it in all views, and in all recordings of the page.
  const colours = {};
  // True for each origin that has the text of the search; undefined without a search.
  let found;
  // The memory that PyTorch has from the driver, if tensors are shown.
  let segments;
  let view;
  let selected = -1;
  let zoomed = [];
  let chosenPools = [];
  let number = -1;
  // The latest choice, because an earlier one may take longer to read.
  let request = 0;

  async function load(id, recording) {
    if (!loaded[id]) loaded[id] = decode(recording, await inflate($(id).textContent));
    return loaded[id];
  }

  function show(next) {
    const wanted = ++request;
    const recording = about.recordings[next];
    const { tensors } = recording;
    $('events').hidden = !recording.columns;
    if (!recording.columns) {
      sources = [];
      data = curves = segments = undefined;
      describe(next);
      document.body.setAttribute('aria-busy', 'false');
      return Promise.resolve();
    }
    document.body.setAttribute('aria-busy', 'true');
    const reading = [load(`data-${next}`, recording)];
    if (tensors) reading.unshift(load(`tensors-${next}`, { ...recording, ...tensors }));
    return Promise.all(reading).then((all) => {
      if (wanted !== request) return;
      sources = all;
      const read = $('source').value === 'tensors' ? all[0] : all.at(-1);
      const moment = next === number && curves && selected >= 0 && selected !== curves.peakAt ? data.time[selected] : null;
      const pool = next === number ? chosenPools[$('pool').value]?.name : undefined;
      data = read;
      if (next !== number) describe(next);
      offer(pool);
      select(!curves ? -1 : moment === null ? firstMoment() : changeAt(data, moment));
    }).catch((error) => {
      $('about').textContent = '';
      $('missing').textContent = `The page cannot show its data: ${error.message}`;
      document.body.setAttribute('aria-busy', 'false');
    });
  }

  // Sets up everything that does not depend on the blocks that are shown.
  function describe(next) {
    number = next;
    const recording = about.recordings[number];
    const name = recording.file.split('/').at(-1);
    const rank = name.match(/\.rank(\d+)\./)?.[1];
    const peak = Math.max(...recording.devices.map((device) => device.peak));
    const program = [shortened(programOf(recording.command) ?? name), rank && `rank ${rank}`].filter(Boolean).join(', ');
    document.title = $('title').textContent = peak > 0 ? `${program}: ${bytesInWords(peak)} at most` : program;
    $('title').title = recording.file;
    const left = recording.notFreed;
    $('about').textContent = [
      shortened(name),
      shortened(recording.command.join(' ')),
      recording.pid === null ? '' : `process ${recording.pid}`,
      timeInWords(recording.end),
      recording.hasOnlyPeaks ? '' : countInWords(recording.blocks, 'block'),
      !recording.blocks || !left ? '' : left.blocks ? `not freed: ${countInWords(left.blocks, 'block')}, ${bytesInWords(left.bytes)}` : 'all were freed',
    ].filter(Boolean).join(' · ');
    $('summary').textContent = recording.devices
      .filter((device) => device.peakAt !== null)
      .flatMap((device) => [
        `${device.name}: the peak was ${bytesInWords(device.peak)}, after ${timeInWords(device.peakTime)}.${device.most ? ` ${shortened(device.most, 240)}.` : ''}`,
        ...(device.driver?.words ? [`${device.name}: ${shortened(device.driver.words, 300)}.`] : []),
        ...device.pools.map((line) => `${shortened(line, 240)}.`),
      ])
      .concat((recording.tensors?.peaks ?? []).map((line) => `${shortened(line, 240)}.`))
      .join('\n');
    $('missing').textContent = recording.missing.join('\n');
    $('refused').textContent = recording.refused ? recording.refused.words.join('\n') : '';
    $('oom').hidden = !recording.refused || recording.refused.after === null;
    $('source-choice').hidden = !recording.tensors;
    if (recording.tensors) $('source').options[0].text = `tensors of ${shortened(recording.tensors.allocator, 40)}`;
    if (data) view = [0, wholeTime()];
    drawFleet();
    for (const button of document.querySelectorAll('.rank')) {
      button.setAttribute('aria-pressed', String(Number(button.dataset.number) === number));
    }
  }

  // Sets up the options that depend on the shown blocks. The pool named `name` stays selected.
  function offer(name) {
    const { allocator, devices, origins } = data.about;
    chosenPools = pools(data);
    $('pool').replaceChildren(...chosenPools.map((pool, at) => new Option(pool.name, at)));
    const busiest = chosenPools.findIndex(
      (pool) => pool.isOnDevice && devices[pool.device].peak === Math.max(...devices.map((of) => of.peak)),
    );
    const same = chosenPools.findIndex((pool) => pool.name === name);
    $('pool').value = same >= 0 ? same : Math.max(0, busiest);
    // Without modules, only the place of a tensor is known.
    $('by-choice').hidden = Boolean(allocator) && !hasClasses();
    offerGroups(origins);
    $('blocks-title').textContent = allocator ? 'Tensors' : 'Blocks';
    $('places').classList.toggle('tensors', Boolean(allocator));
    $('places').tHead.rows[0].cells[4].textContent = `${what()}s`;
    regroup();
  }

  // True if the class of each tensor is known.
  const hasClasses = () => data.about.origins.some((origin) => !['tensor', 'segment'].includes(origin.kind));

  // Returns the word for a block.
  const what = () => (data.about.allocator ? 'tensor' : 'block');

  // A single colour shows nothing. The colours show scopes, places, or kinds: the first of them that has more than one value.
  let isGroupChosen = false;
  function offerGroups(origins) {
    const hasScopes = origins.some((origin) => origin.scope.length > 0);
    const onDevice = origins.filter((origin) => origin.isOnDevice);
    const hasSeveral = (by) => new Set(onDevice.map(NAMES[by])).size > 1;
    const isTensors = Boolean(data.about.allocator);
    for (const option of $('by').options) {
      option.hidden = (!hasScopes && ['scope', 'outer'].includes(option.value)) || (isTensors && ['outer', 'library'].includes(option.value));
    }
    const [byKind, byScope] = $('by').options;
    byKind.text = isTensors ? 'by class' : 'by kind of memory';
    byScope.text = isTensors ? 'by module' : 'by scope';
    const isHidden = $('by').selectedOptions[0]?.hidden;
    if (!isGroupChosen || isHidden) $('by').value = ['scope', 'place', 'kind'].find(hasSeveral) ?? (hasScopes ? 'scope' : 'place');
  }

  // Returns the time at the right edge. Memory that is live at the end also gets a part of the chart.
  function wholeTime() {
    return Math.max(1, data.about.end * 1.01);
  }

  function regroup() {
    $('all-choice').hidden = data.about.origins.every(({ frames, calls }) => String(frames) === String(calls));
    const pool = chosenPools[$('pool').value];
    const isTensors = Boolean(data.about.allocator);
    const by = isTensors && !hasClasses() ? 'place' : $('by').value;
    curves = pool ? series(data, pool, by) : undefined;
    // An outermost scope has the colour that it has as a scope.
    const given = (colours[by === 'outer' ? 'scope' : by] ??= new Map());
    for (const source of sources) for (const each of pools(source)) giveColours(given, groupsOf(source, each, by).shown);
    if (curves) {
      curves.colours = curves.groups.map((name) => given.get(name) ?? OTHERS);
      curves.colourOf = curves.groupOf.map((group) => curves.colours[group]);
    }
    segments = pool && isTensors ? series(data, { ...pool, isOnDevice: false }, 'kind') : undefined;
    const hasScopes = data.about.origins.some((origin) => origin.scope.length > 0);
    $('places').tHead.rows[0].cells[0].textContent = hasScopes ? 'scope and place' : 'place';
    const entry = (name, at) => {
      const span = document.createElement('span');
      span.append(swatch(curves.colours[at]), shortened(name, 80));
      span.title = name;
      return span;
    };
    const entries = curves ? curves.groups.map(entry) : [];
    if (segments) {
      const line = entry('memory that PyTorch holds from the driver');
      line.firstChild.classList.add('line');
      entries.unshift(line);
    }
    $('legend').replaceChildren(...entries);
    $('blocks').hidden = $('places').hidden = !curves;
    find();
    draw();
  }

  // Returns a square of a colour. It has no colour if the sum has several.
  function swatch(colour = '') {
    const square = document.createElement('i');
    square.className = 'swatch';
    square.style.background = colour;
    return square;
  }

  function find() {
    const text = $('search').value.trim();
    found = text ? foundIn(data.about, text, $('all').checked) : undefined;
  }

  function canvas(element) {
    const ratio = window.devicePixelRatio || 1;
    const { width, height } = element.getBoundingClientRect();
    element.width = Math.max(1, Math.round(width * ratio));
    element.height = Math.max(1, Math.round(height * ratio));
    const context = element.getContext('2d');
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    return { context, width, height };
  }

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
  const MARGIN = { left: 66, right: 22, top: 8, bottom: 22 };
  const x = (time, width) =>
    MARGIN.left + ((time - view[0]) / (view[1] - view[0])) * (width - MARGIN.left - MARGIN.right);
  const timeAt = (position, width) =>
    view[0] + ((position - MARGIN.left) / (width - MARGIN.left - MARGIN.right)) * (view[1] - view[0]);

  let isWaiting = false;
  function draw() {
    if (isWaiting) return;
    isWaiting = true;
    requestAnimationFrame(() => {
      isWaiting = false;
      drawChart();
      drawDriver();
      drawBands();
      drawMap();
      document.body.setAttribute('aria-busy', 'false');
    });
  }

  function drawChart() {
    const { context, width, height } = canvas($('chart'));
    if (!curves || !data.time.length) {
      context.font = '14px system-ui, sans-serif';
      context.fillStyle = style('--faint');
      context.fillText('Nothing was allocated.', 20, 30);
      $('capacity').hidden = true;
      return;
    }
    const from = changeAt(data, view[0]);
    const to = changeAt(data, view[1]);
    const [, top] = curves.extremes(Math.max(0, from), to + 1);
    const above = segments ? segments.sum[segments.extremes(Math.max(0, from), to + 1)[1]] : 0;
    const live = Math.max(1, curves.sum[top] ?? 1, above ?? 0);
    // Draws the size of the device, unless the curve would become too low. In that case, only the text below the chart contains it.
    const total = curves.pool.isOnDevice ? data.about.devices[curves.pool.device].total : null;
    const hasLine = total !== null && total <= live * 3;
    const most = (hasLine ? Math.max(live, total) : live) * 1.05;
    const inner = height - MARGIN.top - MARGIN.bottom;
    const y = (bytes) => MARGIN.top + inner * (1 - bytes / most);
    axes(context, width, height, most, y);
    const columns = Math.max(1, Math.floor(width - MARGIN.left - MARGIN.right));
    const light = [];
    const full = [];
    let before = from;
    let last;
    for (let column = 0; column < columns; column++) {
      const end = timeAt(MARGIN.left + column + 1, width);
      const until = search(data.time.length, (at) => data.time[at] >= end) - 1;
      if (until <= before && last) {
        // Nothing happens in this column.
        if (light[column - 1]) full[column] = last;
        else full[column] = full[column - 1];
        continue;
      }
      const first = Math.max(0, before);
      const [least, greatest] = until < 0 ? [-1, -1] : curves.extremes(first, until + 1);
      full[column] = curves.valuesAfter(before < 0 ? -1 : least);
      if (least !== greatest || before < 0) light[column] = curves.valuesAfter(greatest);
      last = curves.valuesAfter(until);
      before = Math.max(before, until);
    }
    for (let column = 0; column < columns; column++) {
      const [begin, end] = [0, 1].map((more) => timeAt(MARGIN.left + column + more, width));
      const known = knownIn(data, curves, begin, end);
      if (known === 'all') continue;
      light[column] = null;
      full[column] = known === 'peak' ? curves.valuesAfter(curves.peakAt) : null;
    }
    const stack = (values, column) => {
      if (!values) return;
      let base = 0;
      for (let group = 0; group < values.length; group++) {
        if (values[group] <= 0) continue;
        context.fillStyle = curves.colours[group];
        const high = y(base + values[group]);
        context.fillRect(MARGIN.left + column, high, 1, y(base) - high);
        base += values[group];
      }
    };
    context.globalAlpha = 0.45;
    light.forEach(stack);
    context.globalAlpha = 1;
    full.forEach(stack);
    if (segments) drawSegments(context, width, columns, y);
    drawUnknown(context, width, height, full);
    drawMarks(context, width, MARGIN.top, height - MARGIN.bottom);
    markRefused(context, width, MARGIN.top, height - MARGIN.bottom);
    markSelected(context, width, MARGIN.top, height - MARGIN.bottom);
    $('capacity').hidden = total === null;
    if (total !== null) drawCapacity(context, width, total, hasLine ? y(total) : undefined);
  }

  // Draws the highest value that PyTorch has from the driver in each column, as a line.
  function drawSegments(context, width, columns, y) {
    const begin = Math.min(width - MARGIN.right, x(unknownUntil(data, curves.pool), width));
    context.strokeStyle = style('--text');
    context.lineWidth = 1.5;
    context.beginPath();
    let before = changeAt(data, view[0]);
    for (let column = 0; column < columns; column++) {
      const left = MARGIN.left + column;
      const until = search(data.time.length, (at) => data.time[at] >= timeAt(left + 1, width)) - 1;
      const most = until < 0 ? 0 : segments.sum[segments.extremes(Math.max(0, before), until + 1)[1]];
      before = Math.max(before, until);
      if (left + 1 <= begin) continue;
      context.lineTo(left, y(most));
      context.lineTo(left + 1, y(most));
    }
    context.stroke();
    context.lineWidth = 1;
  }

  // Draws the size of the device as dashes. Its label is below the chart, because inside it would seem to belong to the nearest line.
  function drawCapacity(context, width, bytes, at) {
    const [dashes, words] = $('capacity').children;
    dashes.hidden = at === undefined;
    words.textContent = `the device's memory, ${bytesInWords(bytes)}${at === undefined ? ', is above this chart' : ''}`;
    if (at === undefined) return;
    context.strokeStyle = style('--text');
    context.setLineDash([8, 4]);
    context.beginPath();
    context.moveTo(MARGIN.left, at);
    context.lineTo(width - MARGIN.right, at);
    context.stroke();
    context.setLineDash([]);
  }

  // Marks the times for which there is no curve, because the live memory is not known.
  function drawUnknown(context, width, height, columns) {
    const parts = [];
    columns.forEach((values, column) => {
      if (values) return;
      if (parts.at(-1)?.end === column) parts.at(-1).end++;
      else parts.push({ begin: column, end: column + 1 });
    });
    context.fillStyle = style('--line');
    for (const { begin, end } of parts) {
      context.fillRect(MARGIN.left + begin, MARGIN.top, end - begin, height - MARGIN.top - MARGIN.bottom);
    }
    context.fillStyle = style('--text');
    context.textAlign = 'center';
    context.textBaseline = 'middle';
    for (const { begin, end } of parts) {
      if (end - begin >= 70) context.fillText('not known', MARGIN.left + (begin + end) / 2, height / 2);
    }
  }

  // Draws a short line at each moment that the program marked, and a long one with its name where there is room.
  function drawMarks(context, width, top, bottom) {
    context.strokeStyle = context.fillStyle = style('--faint');
    context.textAlign = 'left';
    context.textBaseline = 'top';
    let last = -1;
    let textEnd = -1;
    for (const [time, name] of data.about.marks) {
      const at = x(time, width);
      if (at < MARGIN.left || at > width - MARGIN.right || at - last < 2) continue;
      last = at;
      const text = shortened(data.about.frames[name], 40);
      const end = at + 3 + context.measureText(text).width;
      const hasName = at > textEnd && end < width - MARGIN.right;
      context.beginPath();
      context.moveTo(at, top);
      context.lineTo(at, hasName ? bottom : top + 8);
      context.stroke();
      if (!hasName) continue;
      context.fillText(text, at + 3, top);
      textEnd = end + 3;
    }
  }

  // Draws a line where the driver rejected an allocation, with a cross at its top.
  function markRefused(context, width, top, bottom) {
    if (!data.about.refused) return;
    context.strokeStyle = style('--alarm');
    let last = -1;
    for (const time of data.about.refused.times) {
      const at = x(time, width);
      if (at < MARGIN.left || at > width - MARGIN.right || Math.abs(at - last) < 2) continue;
      last = at;
      context.beginPath();
      context.moveTo(at, top);
      context.lineTo(at, bottom);
      context.moveTo(at - 4, top);
      context.lineTo(at + 4, top + 8);
      context.moveTo(at + 4, top);
      context.lineTo(at - 4, top + 8);
      context.stroke();
    }
  }

  function markSelected(context, width, top, bottom) {
    if (selected < 0) return;
    const at = x(data.time[selected], width);
    if (at < MARGIN.left || at > width - MARGIN.right) return;
    context.strokeStyle = style('--text');
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(at, top);
    context.lineTo(at, bottom);
    context.stroke();
    context.setLineDash([]);
  }

  // Steps are 1, 2 or 5, times a power of 10. For bytes, they are times a power of 2.
  function axes(context, width, height, most, y) {
    context.font = '11px system-ui, sans-serif';
    context.fillStyle = style('--faint');
    context.strokeStyle = style('--line');
    context.textAlign = 'right';
    context.textBaseline = 'middle';
    const step = 2 ** Math.ceil(Math.log2(most / 6));
    for (let bytes = 0; bytes <= most; bytes += step) {
      const at = Math.round(y(bytes)) + 0.5;
      context.beginPath();
      context.moveTo(MARGIN.left, at);
      context.lineTo(width - MARGIN.right, at);
      context.stroke();
      context.fillText(bytesInWords(bytes), MARGIN.left - 6, at);
    }
    context.textAlign = 'center';
    context.textBaseline = 'top';
    const rough = ((view[1] - view[0]) * 90) / (width - MARGIN.left - MARGIN.right);
    const power = 10 ** Math.floor(Math.log10(rough));
    const tick = power * ([1, 2, 5, 10].find((factor) => factor * power >= rough) ?? 10);
    for (let time = Math.ceil(view[0] / tick) * tick; time <= view[1]; time += tick) {
      context.fillText(timeInWords(time, tick), x(time, width), height - MARGIN.bottom + 5);
    }
  }

  // The driver's memory of the shown device, or undefined.
  function driverMemory() {
    if (!curves) return undefined;
    const { name } = data.about.devices[curves.pool.device];
    const device = about.recordings[number].devices.find((of) => of.name === name);
    return device?.driver?.kinds.length ? device.driver : undefined;
  }

  const DRIVER_COLOURS = ['#4e79a7', '#f28e2b', '#59a14f', '#e15759', '#76b7b2', '#b07aa1', '#9c755f', '#edc948'];

  // Returns the bytes of each kind at a time.
  const driverAt = ({ kinds }, time) =>
    kinds.map(({ values }) => values[search(values.length, (at) => values[at][0] > time) - 1]?.[1] ?? 0);

  function drawDriver() {
    const driver = driverMemory();
    $('driver').hidden = !driver;
    if (!driver) return;
    const { context, width, height } = canvas($('driver-bands'));
    const inner = height - MARGIN.top - MARGIN.bottom;
    const columns = Math.max(1, Math.floor(width - MARGIN.left - MARGIN.right));
    const stacks = Array.from({ length: columns }, (_, column) => driverAt(driver, timeAt(MARGIN.left + column + 1, width)));
    const most = Math.max(1, ...stacks.map((stack) => stack.reduce((sum, bytes) => sum + bytes, 0))) * 1.05;
    const y = (bytes) => MARGIN.top + inner * (1 - bytes / most);
    axes(context, width, height, most, y);
    stacks.forEach((stack, column) => {
      let below = 0;
      stack.forEach((bytes, kind) => {
        context.fillStyle = DRIVER_COLOURS[kind % DRIVER_COLOURS.length];
        context.fillRect(MARGIN.left + column, y(below + bytes), 1, y(below) - y(below + bytes));
        below += bytes;
      });
    });
    markSelected(context, width, MARGIN.top, height - MARGIN.bottom);
    $('driver-legend').replaceChildren(...driver.kinds.map(({ name }, kind) => {
      const entry = document.createElement('span');
      entry.append(swatch(DRIVER_COLOURS[kind % DRIVER_COLOURS.length]), name);
      return entry;
    }));
  }

  $('driver-bands').addEventListener('pointermove', (event) => {
    const driver = driverMemory();
    if (!driver) return;
    const time = timeAt(position(event), width());
    const bytes = driverAt(driver, time);
    const lines = driver.kinds.map(({ name }, kind) => [bytes[kind], name]).filter(([of]) => of > 0);
    lines.sort(([a], [b]) => b - a);
    tip(event, [
      `after ${timeInWords(Math.max(0, time), view[1] - view[0])}: ${bytesInWords(bytes.reduce((sum, of) => sum + of, 0))} taken by the driver`,
      ...lines.map(([of, name]) => `${bytesInWords(of)}  ${name}`),
    ].join('\n'));
  });
  $('driver-bands').addEventListener('pointerleave', (event) => tip(event, ''));

  const MOST_BANDS = 300;
  let bands = [];
  function drawBands() {
    const { context, width, height } = canvas($('bands'));
    bands = [];
    $('bands-note').textContent = '';
    if (!curves || !data.time.length) return;
    const of = bandsOf(data, curves.pool, changeAt(data, view[0]), changeAt(data, view[1]), MOST_BANDS);
    $('bands-note').textContent =
      `${of.left > 0 ? `The largest ${of.bands.length} ${what()}s` : `The ${what()}s`} of this time, ` +
      'each from its allocation to its free; its height is its size.' +
      (of.left > 0 ? ` ${countInWords(of.left, `smaller ${what()}`)} ${of.left === 1 ? 'is' : 'are'} left out.` : '') +
      (data.about.hasOnlyPeaks ? ' The lifetimes of the others are not known.' : '');
    const scale = (height - 8) / Math.max(1, of.height);
    for (const { block, offset } of of.bands) {
      const begin = Math.max(MARGIN.left, x(data.time[data.born[block]], width));
      const death = data.died[block] === LIVE ? wholeTime() : data.time[data.died[block]];
      const end = Math.min(width - MARGIN.right, x(death, width));
      const top = height - 4 - (offset + data.bytes[block]) * scale;
      const high = Math.max(1, data.bytes[block] * scale);
      const origin = data.origin[block];
      context.fillStyle = curves.colourOf[origin];
      context.globalAlpha = !found || found[origin] ? 1 : 0.15;
      context.fillRect(begin, top, Math.max(1, end - begin), high > 3 ? high - 0.5 : high);
      bands.push({ block, begin, end: Math.max(begin + 1, end), top, high });
    }
    context.globalAlpha = 1;
    markSelected(context, width, 4, height - 4);
  }

  const MOST_ROWS = 40;
  const ROW = 15;
  // The segments of the selected moment. Only PyTorch has segments.
  let map = [];
  function readMap(isKnown) {
    map = segments && selected >= 0 && isKnown ? segmentsAfter(data, curves.pool, selected) : [];
    const rows = map.slice(0, MOST_ROWS);
    $('map').hidden = map.length === 0;
    $('segments').style.height = `${rows.length * ROW + 8}px`;
    $('segments-note').textContent =
      `Each row is a segment that PyTorch holds from the driver, from its first address to its last; memory outside of tensors is unused.` +
      (map.length > rows.length ? ` ${countInWords(map.length - rows.length, 'smaller segment')} left out.` : '');
    map = rows;
  }

  // Returns the position of an address of a row on the canvas.
  function onMap(row, address, width) {
    const most = map[0].end - map[0].begin;
    return MARGIN.left + ((address - row.begin) / most) * (width - MARGIN.left - MARGIN.right);
  }

  function drawMap() {
    if (!map.length) return;
    const { context, width } = canvas($('segments'));
    context.font = '11px system-ui, sans-serif';
    context.textAlign = 'right';
    context.textBaseline = 'middle';
    map.forEach((row, at) => {
      const top = 4 + at * ROW;
      const fill = (begin, end) => {
        const left = onMap(row, begin, width);
        context.fillRect(left, top, Math.max(0.5, onMap(row, end, width) - left), ROW - 3);
      };
      context.fillStyle = style('--faint');
      context.fillText(bytesInWords(row.end - row.begin), MARGIN.left - 6, top + ROW / 2 - 1);
      context.fillStyle = style('--line');
      fill(row.begin, row.end);
      for (const { block, begin, end } of row.tensors) {
        const origin = data.origin[block];
        context.fillStyle = curves.colourOf[origin];
        context.globalAlpha = !found || found[origin] ? 1 : 0.15;
        fill(begin, end);
      }
      context.globalAlpha = 1;
    });
  }

  // Returns the tensor of a segment at a position on the canvas, or the unused bytes there.
  function mapAt(left, top, width) {
    const row = map[Math.floor((top - 4) / ROW)];
    if (!row || left < MARGIN.left || left > onMap(row, row.end, width)) return '';
    // A tensor may be narrower than the precision of the pointer.
    const tensor = row.tensors.findLast(({ begin, end }) => left >= onMap(row, begin, width) - 1 && left <= onMap(row, end, width) + 1);
    if (tensor) return blockInWords(tensor.block);
    const after = row.tensors.findIndex(({ begin }) => onMap(row, begin, width) > left);
    const end = after < 0 ? row.end : row.tensors[after].begin;
    const begin = row.tensors.at(after < 0 ? -1 : after - 1);
    const from = begin && begin.end <= end ? begin.end : row.begin;
    return `${bytesInWords(end - from)} unused, in a segment of ${bytesInWords(row.end - row.begin)}`;
  }

  function blockInWords(block) {
    const origin = data.about.origins[data.origin[block]];
    const died = data.died[block];
    const born = data.time[data.born[block]];
    return [
      shortened(data.about.labels[block] ?? ''),
      `${bytesInWords(data.bytes[block])}, ${origin.kind}`,
      shortened([...origin.scope, origin.place].join(' > ')),
      `allocated ${born <= unknownUntil(data, curves.pool) && segments ? 'at or before' : 'after'} ${timeInWords(born)}`,
      died === LIVE ? 'not freed' : `freed after ${timeInWords(data.time[died])}`,
    ].filter(Boolean).join('\n');
  }

  function showFound() {
    if (!data) return;
    find();
    draw();
    drawMoment();
  }

  function select(change) {
    selected = change;
    zoomed = [];
    draw();
    drawMoment();
  }

  function drawMoment() {
    // In a recording of the peaks, the last change stands for the end.
    const isEnd = curves && data.about.hasOnlyPeaks && selected !== curves.peakAt;
    const time = selected < 0 ? 0 : isEnd ? data.about.end : data.time[selected];
    const isKnown = !curves || isEnd || data.about.hasOnlyPeaks || time >= unknownUntil(data, curves.pool);
    const held = curves && selected >= 0 && isKnown ? heldAfter(data, curves.pool, selected) : new Map();
    const root = flameOf(data, held, $('all').checked, curves?.colourOf, found);
    const isPeak = curves && selected === curves.peakAt;
    $('moment').textContent =
      selected < 0 && !(curves && data.time.length)
        ? 'Nothing was allocated'
        : momentInWords(root.bytes, time, isPeak, isKnown);
    readMap(isKnown);
    drawFlame(root);
    const all = placesOf(data, held, curves?.colourOf);
    const places = found ? placesOf(data, new Map([...held].filter(([origin]) => found[origin])), curves.colourOf) : all;
    const bytesFound = places.reduce((sum, { bytes }) => sum + bytes, 0);
    $('found').textContent = found
      ? `${places.length.toLocaleString('en')} of ${countInWords(all.length, 'place')}, ${bytesInWords(bytesFound)}`
      : '';
    const rows = places.slice(0, 40).map(({ name, kind, bytes, blocks, colour }) => {
      const row = document.createElement('tr');
      const share = root.bytes > 0 ? `${((bytes * 100) / root.bytes).toFixed(1)} %` : '';
      for (const text of [name, kind, bytesInWords(bytes), share, blocks.toLocaleString('en')]) {
        const cell = document.createElement('td');
        cell.textContent = shortened(text);
        if (cell.textContent !== text) cell.title = text;
        row.append(cell);
      }
      row.cells[0].prepend(swatch(colour));
      return row;
    });
    $('places').tBodies[0].replaceChildren(...rows);
    $('places-note').textContent = places.length > rows.length ? `${countInWords(places.length - rows.length, 'smaller place')} left out.` : '';
  }

  // The peak is chosen if it is known. A recording of the device's peaks does not know that of host memory.
  function firstMoment() {
    return data.about.hasOnlyPeaks && !curves.pool.isOnDevice ? data.time.length - 1 : curves.peakAt;
  }

  function momentInWords(bytes, time, isPeak, isKnown) {
    const after = `after ${timeInWords(time)}`;
    if (!isKnown) return `${segments ? 'Tensors' : 'Blocks'} are not known ${after}`;
    const amount = segments
      ? `Tensors: ${bytesInWords(bytes)} of ${bytesInWords(selected < 0 ? 0 : segments.sum[selected])} from the driver`
      : `${bytesInWords(bytes)} live`;
    return `${amount} ${after}${isPeak ? ', the peak' : ''}`;
  }

  function drawFlame(root) {
    let base = root;
    const path = [root];
    for (const frame of zoomed) {
      if (!base.inside.has(frame)) break;
      base = base.inside.get(frame);
      path.push(base);
    }
    const step = (node, depth) => {
      const button = document.createElement('button');
      button.type = 'button';
      button.textContent = shortened(node.name, 40);
      button.onclick = () => {
        zoomed = zoomed.slice(0, depth);
        drawFlame(root);
      };
      return button;
    };
    $('path').replaceChildren(...(path.length > 1 ? path.map(step) : []));
    const frames = [];
    const room = $('flame').getBoundingClientRect().width;
    let deepest = 0;
    const add = (node, left, depth, trail) => {
      let at = left;
      for (const [number, inside] of [...node.inside].sort((a, b) => b[1].bytes - a[1].bytes)) {
        const width = (inside.bytes / base.bytes) * 100;
        if (width < 0.1 || frames.length > 3000) continue;
        deepest = Math.max(deepest, depth + 1);
        const frame = document.createElement('button');
        frame.type = 'button';
        frame.className = 'frame';
        frame.classList.toggle('other', !inside.isFound);
        frame.style.cssText = `left:${at}%;width:${width}%;top:${depth * 19}px`;
        if (inside.colour) frame.style.cssText += `;background:${inside.colour};color:${textOn(inside.colour)}`;
        // A label of one or two characters is useless.
        if ((width / 100) * room > 28) frame.textContent = inside.name;
        const share = ((inside.bytes * 100) / root.bytes).toFixed(1);
        const text = `${shortened(inside.name)}\n${bytesInWords(inside.bytes)}, ${share} %, ${countInWords(inside.blocks, what())}`;
        frame.setAttribute('aria-label', text);
        frame.onpointermove = (event) => tip(event, text);
        frame.onpointerleave = (event) => tip(event, '');
        frame.onfocus = () => frame.matches(':focus-visible') && tip(below(frame), text);
        frame.onblur = (event) => tip(event, '');
        const here = [...trail, number];
        frame.onclick = (event) => {
          tip(event, '');
          zoomed = [...zoomed.slice(0, path.length - 1), ...here];
          drawFlame(root);
        };
        frames.push(frame);
        add(inside, at, depth + 1, here);
        at += width;
      }
    };
    if (base.bytes > 0) add(base, 0, 0, []);
    $('flame').style.height = `${deepest * 19}px`;
    $('flame').replaceChildren(...frames);
  }

  // Returns the colour of text that can be read on this background colour.
  function textOn(colour) {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    return red * 0.3 + green * 0.59 + blue * 0.11 > 125 ? '#000' : '#fff';
  }

  function zoom(factor, around) {
    const [begin, end] = view;
    const length = Math.min(Math.max((end - begin) * factor, 10), wholeTime());
    const share = (around - begin) / (end - begin);
    move(around - share * length, length);
  }

  function move(begin, length = view[1] - view[0]) {
    const last = wholeTime();
    begin = Math.min(Math.max(0, begin), Math.max(0, last - length));
    view = [begin, begin + length];
    draw();
  }

  function tip(event, text) {
    const box = $('tip');
    box.hidden = !text;
    if (!text) return;
    box.textContent = text;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4))}px`;
    box.style.top = `${Math.max(4, event.clientY + 16 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 16)}px`;
  }

  // Returns the position for the tooltip of the element that has the focus.
  function below(element) {
    const { left, bottom } = element.getBoundingClientRect();
    return { clientX: left, clientY: bottom - 10 };
  }

  const position = (event) => event.clientX - $('chart').getBoundingClientRect().left;
  const width = () => $('chart').getBoundingClientRect().width;

  $('chart').addEventListener('wheel', (event) => {
    if (!data) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      move(view[0] + (event.deltaX / width()) * (view[1] - view[0]));
    } else {
      zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(position(event), width()));
    }
  }, { passive: false });
  let drag;
  $('chart').addEventListener('pointerdown', (event) => {
    drag = { at: event.clientX, begin: view?.[0], isMoved: false };
    $('chart').setPointerCapture(event.pointerId);
  });
  $('chart').addEventListener('pointermove', (event) => {
    if (!curves) return;
    if (drag) {
      const by = event.clientX - drag.at;
      drag.isMoved ||= Math.abs(by) > 4;
      if (drag.isMoved) {
        tip(event, '');
        move(drag.begin - (by / (width() - MARGIN.left - MARGIN.right)) * (view[1] - view[0]));
        return;
      }
    }
    const time = timeAt(position(event), width());
    const known = knownIn(data, curves, time, timeAt(position(event) + 1, width()));
    const change = known === 'peak' ? curves.peakAt : changeAt(data, time);
    const values = curves.valuesAfter(change);
    const lines = [...values.keys()].filter((group) => values[group] > 0).sort((a, b) => values[b] - values[a]);
    const total = values.reduce((sum, value) => sum + value, 0);
    const after = `after ${timeInWords(Math.max(0, time), view[1] - view[0])}`;
    if (known === 'nothing') return tip(event, `${after}: ${what()}s are not known`);
    const ofSegments = segments ? ` of ${bytesInWords(change < 0 ? 0 : segments.sum[change])} from the driver` : '';
    tip(event, [
      `${after}: ${bytesInWords(total)}${ofSegments}`,
      ...lines.slice(0, 8).map((group) => `${bytesInWords(values[group])}  ${shortened(curves.groups[group], 80)}`),
      ...(lines.length > 8 ? [`and ${lines.length - 8} more`] : []),
    ].join('\n'));
  });
  $('chart').addEventListener('pointerup', (event) => {
    // A click selects one of all the changes in its column: the highest one.
    if (curves && data.about.hasOnlyPeaks && drag && !drag.isMoved) {
      const known = knownIn(data, curves, ...[0, 1].map((more) => timeAt(position(event) + more, width())));
      if (known !== 'nothing') select(known === 'peak' ? curves.peakAt : data.time.length - 1);
    } else if (curves && drag && !drag.isMoved) {
      const at = Math.floor(position(event));
      const until = changeAt(data, timeAt(at + 1, width()));
      const before = changeAt(data, timeAt(at, width()));
      select(until < 0 ? -1 : curves.extremes(Math.max(0, before), until + 1)[1]);
    }
    drag = undefined;
  });
  $('chart').addEventListener('pointercancel', () => { drag = undefined; });
  $('chart').addEventListener('pointerleave', (event) => tip(event, ''));
  // Selects the next change of this pool, or the previous one.
  function step(by) {
    if (!curves || curves.peakAt < 0 || data.about.hasOnlyPeaks) return;
    let at = selected + by;
    while (at >= 0 && at < data.time.length && !curves.isIn(at)) at += by;
    if (at < 0 || at >= data.time.length) return;
    select(at);
    const length = view[1] - view[0];
    if (data.time[at] < view[0] || data.time[at] > view[1]) move(data.time[at] - length / 2);
  }

  $('chart').addEventListener('keydown', (event) => {
    if (!data) return;
    if (event.shiftKey && ['ArrowLeft', 'ArrowRight'].includes(event.key)) {
      event.preventDefault();
      step(event.key === 'ArrowLeft' ? -1 : 1);
      return;
    }
    const length = view[1] - view[0];
    const middle = view[0] + length / 2;
    const actions = {
      ArrowLeft: () => move(view[0] - length / 10),
      ArrowRight: () => move(view[0] + length / 10),
      '+': () => zoom(0.7, middle),
      '-': () => zoom(1.4, middle),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  });
  $('bands').addEventListener('pointermove', (event) => {
    const box = $('bands').getBoundingClientRect();
    const [left, top] = [event.clientX - box.left, event.clientY - box.top];
    const band = bands.findLast((of) => left >= of.begin && left <= of.end && top >= of.top && top <= of.top + of.high);
    if (!band) return tip(event, '');
    tip(event, blockInWords(band.block));
  });
  $('segments').addEventListener('pointermove', (event) => {
    const { left, top, width } = $('segments').getBoundingClientRect();
    tip(event, mapAt(event.clientX - left, event.clientY - top, width));
  });
  $('segments').addEventListener('pointerleave', (event) => tip(event, ''));
  $('bands').addEventListener('pointerleave', (event) => tip(event, ''));
  $('pool').addEventListener('change', () => {
    regroup();
    select(firstMoment());
  });
  $('source').addEventListener('change', () => number >= 0 && show(number));
  $('by').addEventListener('change', () => {
    isGroupChosen = true;
    regroup();
    drawMoment();
  });
  $('all').addEventListener('change', () => {
    zoomed = [];
    showFound();
  });
  $('search').addEventListener('input', showFound);
  $('search').addEventListener('keydown', (event) => {
    if (event.key !== 'Escape') return;
    $('search').value = '';
    showFound();
  });
  $('whole').addEventListener('click', () => data && move(0, wholeTime()));
  $('oom').addEventListener('click', () => {
    const { after, afterTime } = data?.about.refused ?? { after: null };
    if (after !== null) select(segments ? changeAt(data, afterTime) : after);
  });
  $('peak').addEventListener('click', () => {
    if (!curves || curves.peakAt < 0 || firstMoment() !== curves.peakAt) return;
    const time = data.time[curves.peakAt];
    if (time < view[0] || time > view[1]) move(time - (view[1] - view[0]) / 2);
    select(curves.peakAt);
  });
  $('in').addEventListener('click', () => data && zoom(0.5, (view[0] + view[1]) / 2));
  $('out').addEventListener('click', () => data && zoom(2, (view[0] + view[1]) / 2));
  new ResizeObserver(() => data && draw()).observe($('chart'));
  new ResizeObserver(drawFleet).observe($('fleet-map'));
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
    if (data) draw();
    drawFleet();
  });

  // A function cannot take all values of a thousand curves as arguments.
  const mostOfAll = () => about.recordings.reduce((most, { curve }) => Math.max(most, ...curve), 1);

  function drawRanks() {
    if (about.recordings.length < 2) return;
    $('ranks').hidden = false;
    const most = mostOfAll();
    const names = different(about.recordings.map((recording) => recording.file.split('/').at(-1)));
    if (about.fleet) startFleet(names);
    const reasons = new Map();
    for (const [number, why] of about.fleet?.inDetail ?? []) {
      reasons.set(number, [...(reasons.get(number) ?? []), why]);
    }
    about.recordings.forEach((recording, number) => {
      if (about.fleet && !reasons.has(number)) return;
      const button = document.createElement('button');
      button.type = 'button';
      button.className = 'rank';
      button.dataset.number = number;
      const small = document.createElement('canvas');
      const name = document.createElement('span');
      name.textContent = shortened(names[number], 60);
      button.title = recording.file;
      const peak = document.createElement('span');
      peak.textContent = recording.devices.map((device) => `${device.name}: ${bytesInWords(device.peak)}`).join(', ');
      button.append(small, name, peak);
      if (about.fleet) {
        const why = document.createElement('span');
        why.textContent = reasons.get(number).join(', ');
        button.append(why);
      }
      button.addEventListener('click', () => show(number));
      $('ranks-list').append(button);
      const { context, width: wide, height } = canvas(small);
      context.fillStyle = COLOURS[0];
      recording.curve.forEach((bytes, at) => {
        if (bytes === null) return;
        const high = (bytes / most) * height;
        context.fillRect((at * wide) / recording.curve.length, height - high, wide / recording.curve.length + 0.5, high);
      });
    });
  }

  // Sets up the view of many recordings: the numbers of those in the rows, their names, and the memory of all of them over time.
  let rows = [];
  let rankNames = [];
  let allOverTime = [];
  const [NAMES_WIDE, BARS] = [66, 90];
  const lastEnd = Math.max(1, ...about.recordings.map((recording) => recording.end));
  const peakOf = (recording) => Math.max(0, ...recording.devices.map((device) => device.peak));

  function startFleet(names) {
    const rankOf = (recording) => recording.file.match(/\.rank(\d+)\./)?.[1];
    const ranks = new Set(about.recordings.map(rankOf));
    const haveRanks = ranks.size === about.recordings.length && !ranks.has(undefined);
    rankNames = about.recordings.map((recording, at) => (haveRanks ? `rank ${rankOf(recording)}` : shortened(names[at], 40)));
    $('fleet').hidden = false;
    $('ranks-title').textContent = countInWords(about.recordings.length, 'recording');
    $('fleet-words').textContent = about.fleet.words.join('\n');
    const inDetail = new Set(about.fleet.inDetail.map(([number]) => number)).size;
    $('fleet-events').textContent =
      `The page has the events of ${countInWords(inDetail, 'recording')}: click one below. \`gpumem report --html --rank NUMBER\` adds another rank.`;
    allOverTime = overTime(about.recordings, lastEnd);
    orderRows();
  }

  function orderRows() {
    const collator = new Intl.Collator('en', { numeric: true });
    const byName = (a, b) => collator.compare(rankNames[a], rankNames[b]);
    const byPeak = (a, b) => peakOf(about.recordings[b]) - peakOf(about.recordings[a]) || byName(a, b);
    rows = [...about.recordings.keys()].sort($('fleet-order').value === 'peak' ? byPeak : byName);
    drawFleet();
  }

  // Returns the recordings that are drawn on one line of pixels, if the map has `height` lines.
  const rowsIn = (line, height) =>
    rows.slice(Math.floor((line * rows.length) / height), Math.max(Math.floor(((line + 1) * rows.length) / height), Math.floor((line * rows.length) / height) + 1));
  const highestOf = (numbers) => numbers.reduce((a, b) => (peakOf(about.recordings[b]) > peakOf(about.recordings[a]) ? b : a));

  function drawFleet() {
    if (!about.fleet || number < 0) return;
    differences();
    const { context, width, height } = canvas($('fleet-map'));
    const [wide, high] = [$('fleet-map').width, $('fleet-map').height];
    const [left, bars] = [NAMES_WIDE, BARS].map((columns) => Math.round((columns * wide) / width));
    const columns = wide - left - bars;
    // A map that is hidden, or in a window that is too narrow, has no room.
    if (!(columns > 0)) return;
    const timeOf = (column) => (column * lastEnd) / columns;
    const most = mostOfAll();
    const mostPeak = Math.max(1, ...about.recordings.map(peakOf));
    const image = context.createImageData(wide, high);
    for (let line = 0; line < high; line++) {
      const here = rowsIn(line, high).map((at) => about.recordings[at]);
      for (let column = 0; column < columns; column++) {
        const values = here.map((recording) => mostBetween(recording, timeOf(column), timeOf(column + 1))).filter((bytes) => bytes !== null);
        if (values.length) image.data.set(heat(Math.max(...values) / most), (line * wide + left + column) * 4);
      }
      const bar = (Math.max(...here.map(peakOf)) / mostPeak) * (bars - 8);
      for (let column = 0; column < bar; column++) {
        image.data.set(heat(bar / (bars - 8)), (line * wide + wide - bars + 8 + column) * 4);
      }
    }
    context.putImageData(image, 0, 0);
    // The name of the selected row, and those of some others where there is room.
    const middle = (row) => ((row + 0.5) * height) / rows.length;
    const selectedRow = rows.indexOf(number);
    context.font = '11px system-ui, sans-serif';
    context.textAlign = 'right';
    context.textBaseline = 'middle';
    const name = (row) => {
      const text = `${shortened(rankNames[rows[row]], 10)}${row === selectedRow ? ' ▸' : ''}`;
      context.fillText(text, NAMES_WIDE - 4, Math.min(Math.max(6, middle(row)), height - 6));
    };
    context.fillStyle = style('--faint');
    for (let part = 0; part <= 8; part++) {
      const row = Math.round((part * (rows.length - 1)) / 8);
      if (Math.abs(middle(row) - middle(selectedRow)) > 14) name(row);
    }
    context.fillStyle = style('--text');
    name(selectedRow);
    drawOverTime();
  }

  function drawOverTime() {
    const { context, width, height } = canvas($('fleet-curve'));
    const wide = width - NAMES_WIDE - BARS;
    const x = (part) => NAMES_WIDE + (part * wide) / allOverTime.length;
    const most = Math.max(1, ...allOverTime.map(([, , greatest]) => greatest));
    const y = (bytes) => height - 16 - (bytes / most) * (height - 20);
    const stepped = (values) => {
      context.beginPath();
      values.forEach((bytes, at) => {
        if (bytes === null) return;
        context.lineTo(x(at), y(bytes));
        context.lineTo(x(at + 1), y(bytes));
      });
      context.stroke();
    };
    context.fillStyle = style('--line');
    allOverTime.forEach(([least, , greatest], at) => {
      context.fillRect(x(at), y(greatest), x(1) - x(0) + 0.5, y(least) - y(greatest));
    });
    context.lineWidth = 1;
    context.strokeStyle = style('--text');
    stepped(allOverTime.map(([, median]) => median));
    context.lineWidth = 1.5;
    context.strokeStyle = '#2a7de1';
    const timeOf = (part) => (part * lastEnd) / allOverTime.length;
    stepped(allOverTime.map((_, at) => mostBetween(about.recordings[number], timeOf(at), timeOf(at + 1))));
    context.fillStyle = style('--faint');
    context.font = '11px system-ui, sans-serif';
    context.textBaseline = 'bottom';
    context.fillText('0 s', NAMES_WIDE, height);
    context.textAlign = 'right';
    context.fillText(timeInWords(lastEnd), NAMES_WIDE + wide, height);
    context.textBaseline = 'middle';
    context.fillText(bytesInWords(most), NAMES_WIDE - 4, y(most) + 5);
    context.fillText('0 B', NAMES_WIDE - 4, y(0));
  }

  // Shows the places in which the selected recording has more or less at its peak than the median of all.
  function differences() {
    const places = about.fleet.places.map(({ name, bytes, median }) => ({ name, here: bytes[number], median, more: bytes[number] - median }));
    // A difference below a fiftieth of the largest one is noise.
    const largest = places.reduce((most, { more }) => Math.max(most, Math.abs(more)), 0);
    const shown = places.filter(({ more }) => more !== 0 && Math.abs(more) * 50 >= largest).sort((a, b) => Math.abs(b.more) - Math.abs(a.more)).slice(0, 10);
    $('fleet-selected').textContent = `${rankNames[number]} at its peak, compared with the median of all`;
    $('fleet-places').tBodies[0].replaceChildren(...shown.map(({ name, here, median, more }) => {
      const row = document.createElement('tr');
      for (const text of [name, bytesInWords(here), bytesInWords(median), `${more > 0 ? '+' : ''}${bytesInWords(more)}`]) {
        const cell = document.createElement('td');
        cell.textContent = shortened(text);
        row.append(cell);
      }
      return row;
    }));
    $('fleet-places').hidden = shown.length === 0;
    $('fleet-note').textContent = shown.length ? 'Each recording is compared at its own peak.' : 'No place differs from the median.';
  }

  const rowAt = (event) => {
    const { top, height } = $('fleet-map').getBoundingClientRect();
    const lines = $('fleet-map').height;
    const line = Math.floor(((event.clientY - top) * lines) / height);
    return highestOf(rowsIn(Math.min(Math.max(0, line), lines - 1), lines));
  };
  $('fleet-map').addEventListener('pointermove', (event) => {
    if (!rows.length) return;
    const at = rowAt(event);
    const { left, width } = $('fleet-map').getBoundingClientRect();
    const perColumn = lastEnd / (width - NAMES_WIDE - BARS);
    const time = (event.clientX - left - NAMES_WIDE) * perColumn;
    const bytes = time < 0 ? null : mostBetween(about.recordings[at], time, time + perColumn);
    tip(event, [
      `${rankNames[at]}: ${bytesInWords(peakOf(about.recordings[at]))} at most`,
      bytes === null ? '' : `after ${timeInWords(time)}: ${bytesInWords(bytes)}`,
    ].filter(Boolean).join('\n'));
  });
  $('fleet-map').addEventListener('pointerleave', (event) => tip(event, ''));
  $('fleet-map').addEventListener('click', (event) => show(rowAt(event)));
  $('fleet-map').addEventListener('keydown', (event) => {
    const next = rows[rows.indexOf(number) + ({ ArrowUp: -1, ArrowDown: 1 }[event.key] ?? NaN)];
    if (next === undefined) return;
    event.preventDefault();
    show(next);
  });
  $('fleet-order').addEventListener('change', orderRows);

  drawRanks();
  if (about.recordings.length) show(about.fleet?.inDetail[0]?.[0] ?? 0);
}

if (typeof document !== 'undefined') start();
