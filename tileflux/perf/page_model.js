// What was recorded, ready to be drawn. Times come as whole nanoseconds and become microseconds here.

const DATA = JSON.parse(document.getElementById("data").textContent);
const FIELDS = ["row", "owner", "chunk", "m", "n", "turn", "program", "begin", "wait", "compute", "finish"];

// Eight colours that stay apart for every kind of colour vision (after Okabe and Ito), then eight that keep as much
// distance from them as there is left. Neighbours contrast most, since neighbouring ranks are multiplied in succession.
const PALETTE = [
  "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#5d2e8c", "#56b4e9", "#e8d733",
  "#587c46", "#2fd6ad", "#7c4622", "#5a2be0", "#8ea058", "#a0106a", "#7c6ae8", "#b2d67c",
];

let theme = {};

function mix(colour, other, share) {
  const part = (text, i) => parseInt(text.slice(1 + 2 * i, 3 + 2 * i), 16);
  return "#" + [0, 1, 2].map((i) =>
    Math.round(part(colour, i) * (1 - share) + part(other, i) * share).toString(16).padStart(2, "0")).join("");
}

function readTheme() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue("--" + name).trim();
  theme = {};
  for (const name of ["page", "panel", "ink", "soft", "faint", "line", "grid", "empty", "hatch", "hatch-back",
    "accent", "good", "computing", "finishing", "sum", "mark"]) theme[name] = read(name);
  const lift = Number(read("lift"));
  theme.ranks = PALETTE.map((colour) => mix(colour, "#ffffff", lift));
  theme.edges = theme.ranks.map((colour) => mix(colour, "#000000", 0.42));
  theme.font = getComputedStyle(document.body).fontFamily;
}

const colourOf = (rank) => theme.ranks[rank % PALETTE.length];
const edgeOf = (rank) => theme.edges[rank % PALETTE.length];

function hatch(context) {
  const size = 6, tile = document.createElement("canvas");
  tile.width = tile.height = size;
  const pen = tile.getContext("2d");
  pen.fillStyle = theme["hatch-back"];
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = theme.hatch;
  pen.lineWidth = 1.3;
  for (const shift of [-size, 0, size]) {
    pen.beginPath();
    pen.moveTo(shift, size);
    pen.lineTo(shift + size, 0);
    pen.stroke();
  }
  return context.createPattern(tile, "repeat");
}

// A rank's tiles as columns of numbers, and for every row of the picture its tiles from left to right.
function openRank(timeline, raw) {
  const rank = { ...raw, timeline, tiles: {}, count: raw.tiles.row.length };
  for (const name of FIELDS) rank.tiles[name] = raw.tiles[name];
  const { begin, wait, compute, finish, row, owner } = rank.tiles;
  const times = { begin: [], ready: [], computed: [], finished: [] };
  rank.byRow = rank.rows.map(() => []);
  rank.byOwner = new Map();
  for (let i = 0; i < rank.count; i++) {
    times.begin.push(begin[i] / 1000);
    times.ready.push((begin[i] + wait[i]) / 1000);
    times.computed.push((begin[i] + wait[i] + compute[i]) / 1000);
    times.finished.push((begin[i] + wait[i] + compute[i] + finish[i]) / 1000);
    rank.byRow[row[i]].push(i);
    if (!rank.byOwner.has(owner[i])) rank.byOwner.set(owner[i], []);
    rank.byOwner.get(owner[i]).push(i);
  }
  Object.assign(rank, times);
  for (const tiles of rank.byRow) tiles.sort((a, b) => rank.begin[a] - rank.begin[b]);
  rank.lanes = lanesOf(timeline, rank);
  return rank;
}

// Strips above a rank's tiles: what leaves (only where tiles travel) and what arrives, a lane per peer.
function lanesOf(timeline, rank) {
  const after = (peer) => (peer - rank.rank + timeline.world) % timeline.world;
  const strip = (kind, bars) => {
    const peers = [...new Set(bars.map((bar) => bar.peer))].sort((a, b) => after(a) - after(b));
    return { kind, lanes: peers.map((peer) => ({ peer, bars: bars.filter((bar) => bar.peer === peer) })) };
  };
  const open = ([source, target, chunk, begin, end, bytes]) =>
    ({ source, target, chunk, begin: begin / 1000, end: end / 1000, bytes });
  const all = timeline.transfers.map(open);
  const arriving = all.filter((bar) => bar.target === rank.rank).map((bar) => ({ ...bar, peer: bar.source }));
  let leaving = all.filter((bar) => bar.source === rank.rank).map((bar) => ({ ...bar, peer: bar.target }));
  if (!leaving.length) leaving = sendsOf(rank);
  const strips = timeline.sendsTiles ? [strip("leaving", leaving), strip("arriving", arriving)] : [strip("arriving", arriving)];
  return strips.filter((one) => one.lanes.length);
}

// Where no transfer was recorded, a tile's own finish is its way to the owner.
function sendsOf(rank) {
  const { owner, chunk, turn } = rank.tiles;
  const bars = [];
  for (let i = 0; i < rank.count; i++) {
    if (owner[i] === rank.rank || turn[i]) continue;
    bars.push({ source: rank.rank, target: owner[i], peer: owner[i], chunk: chunk[i], begin: rank.computed[i], end: rank.finished[i], tile: i });
  }
  return bars;
}

const TIMELINES = DATA.timelines.map((raw) => {
  const timeline = { ...raw };
  timeline.ranks = raw.ranks.map((rank) => openRank(timeline, rank));
  return timeline;
});
const MAIN = TIMELINES[TIMELINES.length - 1];

function time(us, digits = 3) {
  const size = Math.abs(us);
  if (size >= 1e6) return (us / 1e6).toPrecision(digits) + " s";
  if (size >= 1000) return (us / 1000).toFixed(size >= 1e5 ? 0 : size >= 1e4 ? 1 : 2) + " ms";
  if (size >= 100) return us.toFixed(0) + " µs";
  return us.toFixed(size >= 10 ? 1 : 2) + " µs";
}

const percent = (share) => (100 * share).toFixed(share < 0.0995 ? 1 : 0) + " %";

function bytes(count) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (count >= size) return (count / size).toFixed(1) + " " + unit;
  }
  return count + " B";
}

// Round numbers for an axis, about one every ``width`` of the span.
function ticks(from, to, count) {
  const rough = (to - from) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough) || power;
  const found = [];
  for (let at = Math.ceil(from / step - 1e-9) * step; at <= to + step * 1e-6; at += step) found.push(at);
  return { step, found };
}

// A canvas as large as its place on the screen, in real pixels. Returns a pen in CSS pixels.
function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return pen;
}
