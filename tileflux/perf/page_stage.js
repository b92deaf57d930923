// The main picture: for every timeline its transfers, its tiles and its utilisation, all on one time axis.

const GUTTER = 84, RIGHT = 18, AXIS = 26, ARROWS = 8, MAX_LINES = 64, MAX_ARROWS = 400;
const stage = document.getElementById("stage");
const base = document.getElementById("base"), over = document.getElementById("over"), tip = document.getElementById("tip");
const view = { from: 0, to: 1, rank: null, regions: [], width: 0, height: 0, top: null, hover: null, drag: null };

const marks = DATA.marks;
const longest = Math.max(...TIMELINES.map((timeline) => timeline.end), 1);
const FULL = Math.max(longest, ...marks.map((mark) => mark.at).filter((at) => at < 1.5 * longest)) * 1.012;

const x = (at) => GUTTER + (at - view.from) / (view.to - view.from) * (view.width - GUTTER - RIGHT);
const at = (px) => view.from + (px - GUTTER) / (view.width - GUTTER - RIGHT) * (view.to - view.from);

function shownRanks(timeline) {
  return view.rank === null ? timeline.ranks : timeline.ranks.filter((rank) => rank.rank === view.rank);
}

// From top to bottom: what is where. Tiles get what height the rest leaves.
function layOut() {
  measureTop();
  const blocks = TIMELINES.map((timeline) => ({ timeline, ranks: shownRanks(timeline) }));
  const groups = blocks.flatMap((block) => block.ranks);
  const crowded = groups.length > 1;
  const numLanes = groups.reduce((sum, rank) => sum + rank.lanes.reduce((n, strip) => n + strip.lanes.length, 0), 0);
  const numRows = groups.reduce((sum, rank) => sum + rank.rows.length, 0);
  const numStrips = groups.reduce((sum, rank) => sum + rank.lanes.length, 0);
  const lane = crowded ? Math.max(3, Math.min(8, 150 / Math.max(1, numLanes))) : Math.max(7, Math.min(15, 170 / Math.max(1, numLanes)));
  const use = blocks.length > 1 ? 34 : 58;
  const heading = crowded ? 0 : 18;
  const fixed = marksHeight() + AXIS + numLanes * lane + (numStrips + groups.length) * (heading + 4)
    + groups.length * (crowded ? 3 : ARROWS) + blocks.length * (use + 22 + (blocks.length > 1 ? 36 : 0));
  const top = stage.getBoundingClientRect().top + window.scrollY;
  const room = Math.min(Math.max(window.innerHeight - top - 40, 400) - fixed, 560);
  const least = Math.max(0.5, Math.min(16, 200 / Math.max(1, numRows)));
  const row = Math.max(least, Math.min(crowded ? 26 : 40, room / Math.max(1, numRows)));
  view.regions = [];
  let y = marksHeight() + 2;
  for (const block of blocks) {
    if (blocks.length > 1) { add({ kind: "title", block }, 30); }
    for (const rank of block.ranks) {
      for (const strip of rank.lanes) {
        if (heading) add({ kind: "heading", text: stripTitle(block.timeline, strip) }, heading);
        for (const one of strip.lanes) add({ kind: "lane", strip, lane: one, rank, crowded }, lane);
        y += heading ? 3 : 1;
      }
      if (heading) add({ kind: "heading", text: rowsTitle(block.timeline, rank) }, heading);
      if (rank.lanes.length && !crowded) y += ARROWS;
      add({ kind: "rows", rank, row, crowded }, row * rank.rows.length);
      y += crowded ? 7 : 4;
    }
    if (block.ranks.length) {
      add({ kind: "heading", text: "Utilisation" }, 16);
      add({ kind: "use", block }, use);
    }
    y += blocks.length > 1 ? 10 : 4;
  }
  view.height = Math.ceil(y + AXIS);
  function add(region, height) {
    view.regions.push({ ...region, y, height });
    y += height;
  }
}

const unitWord = (timeline, count) => timeline.unitWord + (count === 1 ? "" : "s");
const stripTitle = (timeline, strip) => strip.kind === "leaving" ? "Tiles leaving for their owners"
  : timeline.sendsTiles ? "Tiles arriving from peers, to be summed" : "Chunks arriving from peers";
function rowsTitle(timeline, rank) {
  const used = rank.byRow.filter((tiles) => tiles.length).length, all = rank.rows.length;
  return `Tiles on ${used && used < all ? used + " of " : ""}${all} ${unitWord(timeline, all)}`;
}

// A label stands left of its mark, the last one right of it if there is room; where two would meet, one goes lower.
function placeMarks(pen) {
  pen.font = `600 12px ${theme.font}`;
  const inside = marks.filter((mark) => x(mark.at) >= GUTTER && x(mark.at) <= view.width - RIGHT + 1);
  let end = 0;
  return inside.sort((a, b) => a.at - b.at).map((mark, index) => {
    const px = Math.round(x(mark.at)) + 0.5, text = `${mark.name} ${time(mark.at)}`, width = pen.measureText(text).width + 6;
    const right = index === inside.length - 1 && px + width < view.width;
    const row = (right ? px : px - width) < end + 8 && view.top !== 20 ? 1 : 0;
    end = right ? px + width : px;
    return { px, text, right, row };
  });
}

const marksHeight = () => view.top;

// The room for labels is that of the whole call, so that zooming moves nothing up or down.
function measureTop() {
  const { from, to } = view;
  view.top = null;
  Object.assign(view, { from: 0, to: FULL });
  view.top = !marks.length ? 4 : 20 + 15 * Math.max(0, ...placeMarks(base.getContext("2d")).map((mark) => mark.row));
  Object.assign(view, { from, to });
}

function draw() {
  const pen = fit(base, view.width, view.height);
  pen.fillStyle = theme.panel;
  pen.fillRect(0, 0, view.width, view.height);
  pen.textBaseline = "middle";
  drawGrid(pen);
  const pattern = hatch(pen);
  for (const region of view.regions) if (region.kind !== "heading") DRAW[region.kind](pen, region, pattern);
  drawArrivals(pen);
  for (const region of view.regions) if (region.kind === "heading") DRAW.heading(pen, region);
  drawMarks(pen);
  drawOver();
}

function clipped(pen, region, paint) {
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, region.y - 4, view.width - GUTTER - RIGHT + 1, region.height + 8);
  pen.clip();
  paint();
  pen.restore();
}

function words(pen, text, px, py, { size = 12, weight = 400, colour = theme.soft, align = "left" } = {}) {
  pen.font = `${weight} ${size}px ${theme.font}`;
  pen.fillStyle = colour;
  pen.textAlign = align;
  pen.fillText(text, px, py);
  return pen.measureText(text).width;
}

function drawGrid(pen) {
  const bottom = view.height - AXIS;
  const { step, found } = ticks(view.from, view.to, (view.width - GUTTER) / 110);
  const inMs = FULL >= 1000;
  const scale = inMs ? 1000 : 1;
  const digits = Math.max(0, Math.ceil(-Math.log10(step / scale) - 1e-9) + (String(step / scale).includes("25") ? 1 : 0));
  for (const tick of found) {
    const px = Math.round(x(tick)) + 0.5;
    pen.strokeStyle = theme.grid;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(px, marksHeight());
    pen.lineTo(px, bottom + 4);
    pen.stroke();
    if (px < view.width - 40) words(pen, (tick / scale).toFixed(Math.min(4, digits)), px, bottom + 14, { align: "center" });
  }
  words(pen, inMs ? "ms" : "µs", view.width - RIGHT, bottom + 14, { align: "right", weight: 600 });
  words(pen, "time", 0, bottom + 14, { weight: 600 });
}

const DRAW = {
  title(pen, { y, height, block }) {
    const { timeline } = block, middle = y + height - 12;
    words(pen, timeline.label, 0, middle, { size: 15, weight: 650, colour: theme.ink });
    clipped(pen, { y, height }, () => {
      const end = x(timeline.end), width = pen.measureText("").width;
      pen.fillStyle = timeline === MAIN ? theme.good : theme.faint;
      pen.fillRect(x(0), middle + 7, end - x(0), 3);
      const label = time(timeline.end);
      const put = end - 6 - width < x(0) + 60 ? "left" : "right";
      words(pen, label, end - 2, middle - 2, { size: 15, weight: 650, colour: timeline === MAIN ? theme.good : theme.ink, align: put });
      if (timeline === MAIN && longest > timeline.end * 1.02) drawSaved(pen, end, x(longest), middle);
    });
  },
  heading(pen, { y, height, text }) {
    pen.font = `600 12px ${theme.font}`;
    pen.fillStyle = theme.panel;
    pen.fillRect(GUTTER, y + 1, pen.measureText(text).width + 8, height - 1);
    words(pen, text, GUTTER, y + height / 2 + 1, { weight: 600, colour: theme.ink });
  },
  lane(pen, { y, height, lane, strip, crowded }) {
    if (!crowded) {
      const size = Math.min(12, height);
      words(pen, `rank ${lane.peer}`, GUTTER - 10, y + height / 2 + 0.5, { align: "right", size });
    }
    pen.fillStyle = theme.empty;
    pen.fillRect(GUTTER, y + 0.5, view.width - GUTTER - RIGHT, height - 1);
    clipped(pen, { y, height }, () => { for (const bar of lane.bars) drawBar(pen, bar, strip, y, height); });
  },
  rows(pen, region, pattern) {
    drawRowLabels(pen, region);
    pen.fillStyle = theme.empty;
    pen.fillRect(GUTTER, region.y, view.width - GUTTER - RIGHT, region.height);
    clipped(pen, { y: region.y + 4, height: region.height - 8 }, () => drawTiles(pen, region, pattern));
  },
  use: drawUse,
};

function drawSaved(pen, from, to, middle) {
  const text = `${percent(1 - MAIN.end / longest)} less time · ${(longest / MAIN.end).toFixed(2)}×`;
  pen.strokeStyle = theme.good;
  pen.lineWidth = 1.5;
  pen.setLineDash([4, 3]);
  pen.beginPath();
  pen.moveTo(from + 4, middle + 8.5);
  pen.lineTo(to, middle + 8.5);
  pen.stroke();
  pen.setLineDash([]);
  if (to - from > 150) words(pen, text, (from + to) / 2, middle - 2, { size: 13, weight: 600, colour: theme.good, align: "center" });
}

function drawBar(pen, bar, strip, y, height) {
  const left = x(bar.begin), right = x(bar.end);
  if (right < GUTTER || left > view.width) return;
  const colour = colourOf(bar.peer);
  pen.globalAlpha = bar.tile === undefined ? 0.42 : 0.5;
  pen.fillStyle = colour;
  pen.fillRect(left, y + 1, Math.max(right - left, 1), height - 2);
  pen.globalAlpha = 1;
  if (bar.tile !== undefined) return;
  pen.fillRect(right - 2.5, y + 0.5, 2.5, height - 1);
  if (right - left > 22 && height >= 10) {
    words(pen, `${bar.chunk}`, (left + right) / 2, y + height / 2 + 0.5, { size: Math.min(11, height - 2), align: "center", colour: theme.ink });
  }
}

function drawRowLabels(pen, { rank, row, y, height, crowded }) {
  if (crowded) {
    words(pen, `rank ${rank.rank}`, GUTTER - 10, y + height / 2, { align: "right", weight: 600, colour: theme.ink });
    return;
  }
  const every = [1, 2, 4, 8, 16, 32, 64].find((count) => count * row >= 15) || 128;
  rank.rows.forEach((unit, index) => {
    if (index % every === 0 && (index + 0.6) * row < height) {
      words(pen, `${rank.timeline.unitWord} ${unit}`, GUTTER - 10, y + (index + 0.5) * row, { align: "right", size: 11.5 });
    }
  });
}

// Rectangles of tiles ``of`` a rank; ``only`` chooses some, for highlighting.
function drawTiles(pen, { rank, row, y }, pattern, only) {
  const gap = row >= 8 ? 2 : row >= 5 ? 1 : row >= 3 ? 0.5 : 0;
  const ratio = window.devicePixelRatio || 1, snap = (px) => Math.round(px * ratio) / ratio;
  const tops = rank.rows.map((_, index) => snap(y + index * row)).concat(snap(y + rank.rows.length * row));
  const { turn } = rank.tiles, rows = rank.tiles.row;
  const scale = (view.width - GUTTER - RIGHT) / (view.to - view.from), shift = GUTTER - view.from * scale;
  const waits = [];
  for (const [owner, tiles] of rank.byOwner) {
    for (const pass of [0, 1]) {
      pen.fillStyle = pass ? edgeOf(owner) : colourOf(owner);
      for (const i of tiles) {
        if (rank.finished[i] < view.from || rank.begin[i] > view.to || (only && !only(i))) continue;
        const top = tops[rows[i]], height = Math.max(tops[rows[i] + 1] - top - gap, 0.5);
        if (!pass) {
          if (rank.ready[i] > rank.begin[i]) waits.push(i);
          const left = rank.ready[i] * scale + shift, width = (rank.computed[i] - rank.ready[i]) * scale;
          pen.fillRect(left, top, width > 4 ? width : Math.max(width, 0.4), height);
        } else if (rank.finished[i] > rank.computed[i]) {
          const sums = isSum(rank, i);
          if (sums) pen.fillStyle = theme.sum;
          const left = rank.computed[i] * scale + shift;
          pen.fillRect(left, top, Math.max((rank.finished[i] - rank.computed[i]) * scale, turn[i] ? 0.6 : 0.4), height);
          if (sums) pen.fillStyle = edgeOf(owner);
        }
      }
    }
  }
  pen.fillStyle = pattern;
  for (const i of waits) {
    const width = (rank.ready[i] - rank.begin[i]) * scale;
    const top = tops[rows[i]], height = Math.max(tops[rows[i] + 1] - top - gap, 0.5);
    if (width > 0.3) pen.fillRect(rank.begin[i] * scale + shift, top, width, height);
  }
}

const isSum = (rank, i) => rank.timeline.sendsTiles && rank.timeline.sumsTiles
  && (rank.tiles.turn[i] === 1 || (rank.timeline.op === "gemm_rs" && rank.tiles.owner[i] === rank.rank));

// Where a chunk arrives, a line through the tiles: those of its colour begin there.
function drawArrivals(pen) {
  for (const region of view.regions) {
    if (region.kind !== "lane" || region.strip.kind !== "arriving") continue;
    const rows = view.regions.find((other) => other.kind === "rows" && other.rank === region.rank);
    const count = region.strip.lanes.reduce((sum, lane) => sum + lane.bars.length, 0);
    if (count > MAX_ARROWS) continue;
    const last = Math.max(...region.lane.bars.map((bar) => bar.end));
    for (const bar of region.lane.bars) {
      const px = x(bar.end);
      if (px < GUTTER || px > view.width - RIGHT) continue;
      const bottom = rows.y + rows.height, size = region.crowded ? 3 : 5;
      pen.strokeStyle = theme.ink;
      pen.globalAlpha = bar.end === last ? 0.5 : 0.28;
      pen.lineWidth = 1;
      pen.setLineDash([3, 3]);
      pen.beginPath();
      if (count <= MAX_LINES || bar.end === last) {
        pen.moveTo(px, region.y + region.height);
        pen.lineTo(px, bottom);
      }
      pen.stroke();
      pen.setLineDash([]);
      pen.globalAlpha = 1;
      pen.fillStyle = colourOf(bar.peer);
      pen.strokeStyle = theme.panel;
      pen.beginPath();
      pen.moveTo(px - size, rows.y - size - 1);
      pen.lineTo(px + size, rows.y - size - 1);
      pen.lineTo(px, rows.y + size - 2);
      pen.closePath();
      pen.stroke();
      pen.fill();
    }
  }
}

function drawUse(pen, { y, height, block }) {
  const { timeline, ranks } = block, bins = ranks[0].shares[0].length;
  const mean = [0, 1, 2].map((state) =>
    Array.from({ length: bins }, (_, i) => ranks.reduce((sum, rank) => sum + rank.shares[state][i], 0) / ranks.length / 1000));
  pen.fillStyle = theme.empty;
  pen.fillRect(GUTTER, y, view.width - GUTTER - RIGHT, height);
  words(pen, "100 %", GUTTER - 10, y + 5, { align: "right", size: 11 });
  words(pen, "0", GUTTER - 10, y + height - 4, { align: "right", size: 11 });
  const fills = [theme.computing, theme.finishing, hatch(pen)];
  clipped(pen, { y: y + 4, height: height - 8 }, () => {
    const below = new Array(bins).fill(0);
    for (let state = 0; state < 3; state++) {
      pen.fillStyle = fills[state];
      pen.beginPath();
      for (let i = 0; i < bins; i++) pen.lineTo(x((i + 0.5) / bins * timeline.end), y + height * (1 - below[i]));
      for (let i = bins - 1; i >= 0; i--) {
        below[i] += mean[state][i];
        pen.lineTo(x((i + 0.5) / bins * timeline.end), y + height * (1 - below[i]));
      }
      pen.closePath();
      pen.fill();
    }
  });
}

function drawMarks(pen) {
  const placed = placeMarks(pen);
  for (const { px, row } of placed) {
    pen.strokeStyle = theme.mark;
    pen.lineWidth = 1.3;
    pen.setLineDash([6, 4]);
    pen.beginPath();
    pen.moveTo(px, 4 + 15 * row);
    pen.lineTo(px, view.height - AXIS);
    pen.stroke();
    pen.setLineDash([]);
  }
  for (const { px, text, right, row } of placed) {
    const width = pen.measureText(text).width + 4;
    pen.fillStyle = theme.panel;
    pen.fillRect(right ? px + 4 : px - 4 - width, 3 + 15 * row, width, 14);
    words(pen, text, px + (right ? 6 : -6), 10 + 15 * row, { colour: theme.mark, weight: 600, align: right ? "left" : "right" });
  }
}
