// Pointing, zooming and choosing a rank.

function drawOver() {
  const pen = fit(over, view.width, view.height);
  const { hover, drag } = view;
  if (hover && hover.follow) {
    const pattern = hatch(pen);
    for (const region of view.regions) {
      if (region.kind !== "rows" || region.rank !== hover.rank) continue;
      const { owner, chunk } = region.rank.tiles;
      clipped(pen, { y: region.y + 4, height: region.height - 8 }, () => {
        pen.globalAlpha = 0.72;
        pen.fillStyle = theme.panel;
        pen.fillRect(0, region.y, view.width, region.height);
        pen.globalAlpha = 1;
        drawTiles(pen, region, pattern, (i) => owner[i] === hover.owner && chunk[i] === hover.chunk);
      });
    }
  }
  if (hover) {
    pen.strokeStyle = theme.ink;
    pen.globalAlpha = 0.55;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(Math.round(hover.px) + 0.5, marksHeight());
    pen.lineTo(Math.round(hover.px) + 0.5, view.height - AXIS);
    pen.stroke();
    pen.globalAlpha = 1;
    if (hover.box) {
      pen.strokeStyle = theme.ink;
      pen.lineWidth = 1.6;
      pen.strokeRect(...hover.box);
    }
    const label = time(at(hover.px), 4);
    pen.textBaseline = "middle";
    pen.font = `600 12px ${theme.font}`;
    const width = pen.measureText(label).width + 12;
    const left = Math.min(Math.max(hover.px - width / 2, GUTTER), view.width - width);
    pen.fillStyle = theme.ink;
    pen.fillRect(left, view.height - AXIS + 4, width, 19);
    words(pen, label, left + 6, view.height - AXIS + 14, { weight: 600, colour: theme.panel });
  }
  if (drag && drag.zooms) {
    pen.fillStyle = theme.accent;
    pen.globalAlpha = 0.18;
    pen.fillRect(drag.from, 0, drag.to - drag.from, view.height - AXIS);
    pen.globalAlpha = 1;
  }
}

function find(px, py) {
  const region = view.regions.find((one) => py >= one.y && py < one.y + one.height);
  if (!region || px < GUTTER || px > view.width - RIGHT) return null;
  if (region.kind === "rows") return findTile(region, px, py);
  return region.kind === "lane" ? findBar(region, px) : null;
}

function findTile(region, px, py) {
  const { rank, row, y } = region, when = at(px);
  const index = Math.min(rank.rows.length - 1, Math.floor((py - y) / row)), tiles = rank.byRow[index];
  let low = 0, high = tiles.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rank.begin[tiles[middle]] <= when) low = middle + 1; else high = middle;
  }
  const i = tiles[low - 1];
  if (i === undefined || rank.finished[i] < when) return null;
  const left = x(rank.begin[i]), box = [left, y + index * row, x(rank.finished[i]) - left, row];
  return { rank, box, follow: true, owner: rank.tiles.owner[i], chunk: rank.tiles.chunk[i], text: tileText(rank, i, rank.rows[index]) };
}

function findBar(region, px) {
  const { lane, rank, strip, y, height } = region, when = at(px), slack = 3 * (view.to - view.from) / view.width;
  const bar = lane.bars.find((one) => when >= one.begin - slack && when <= one.end + slack);
  if (!bar) return null;
  const box = [x(bar.begin), y, x(bar.end) - x(bar.begin), height];
  const owner = strip.kind === "arriving" && rank.timeline.sendsTiles ? rank.rank : bar.peer;
  return { rank, box, follow: true, owner, chunk: bar.chunk, text: barText(rank, bar, owner) };
}

const chip = (rank) => `<i style="background:${colourOf(rank)}"></i>`;
const lines = (pairs) => "<table>" + pairs.map(([name, value]) => `<tr><td>${name}</td><td>${value}</td></tr>`).join("") + "</table>";

function tileText(rank, i, unit) {
  const { owner, chunk, m, n, turn, program } = rank.tiles, { timeline } = rank;
  const sends = timeline.sendsTiles;
  const whose = sends ? (owner[i] === rank.rank ? "own rows" : `for rank ${owner[i]}`) : (owner[i] === rank.rank ? "own rows" : `rows of rank ${owner[i]}`);
  const kept = sends && owner[i] === rank.rank;
  const finish = isSum(rank, i) ? "waited for peers, summed" : kept ? "kept" : sends ? "sent" : "stored";
  const pairs = [
    ["tile", `row ${m[i]}, column ${n[i]}`], ["on", `${timeline.unitWord} ${unit}, program ${program[i]}`],
    ["begins", time(rank.begin[i], 4)], ["waited", time(rank.ready[i] - rank.begin[i])],
    ["computed", time(rank.computed[i] - rank.ready[i])], [finish, time(rank.finished[i] - rank.computed[i])],
  ];
  return `<b>${chip(owner[i])}${whose}, chunk ${chunk[i]}${turn[i] ? ", sum" : ""}</b>${lines(pairs)}`;
}

function barText(rank, bar, owner) {
  const pairs = [["sent", time(bar.begin, 4)], ["arrives", time(bar.end, 4)], ["under way", time(bar.end - bar.begin)]];
  if (bar.bytes) pairs.push(["size", bytes(bar.bytes)], ["speed", (bar.bytes / (bar.end - bar.begin) / 1000).toFixed(1) + " GB/s"]);
  let first = Infinity;
  for (const i of rank.byOwner.get(owner) || []) if (rank.tiles.chunk[i] === bar.chunk) first = Math.min(first, rank.ready[i]);
  if (!rank.timeline.sendsTiles && isFinite(first)) pairs.push(["first tile begins", time(first - bar.end) + " later"]);
  return `<b>${chip(bar.peer)}chunk ${bar.chunk}, rank ${bar.source} to rank ${bar.target}</b>${lines(pairs)}`;
}

function showTip(event, text) {
  tip.style.visibility = text ? "visible" : "hidden";
  if (!text) return;
  tip.innerHTML = text;
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 18 + width > window.innerWidth ? event.clientX - width - 14 : event.clientX + 18;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, window.innerHeight - height - 6)) + "px";
}

function zoom(from, to) {
  const least = FULL / 20000;
  if (to - from < least) { const middle = (from + to) / 2; from = middle - least / 2; to = middle + least / 2; }
  const span = Math.min(to - from, FULL);
  view.from = Math.min(Math.max(0, from), FULL - span);
  view.to = view.from + span;
  document.getElementById("reset").disabled = span >= FULL * 0.9999;
  draw();
}

const isZoomed = () => view.to - view.from < FULL * 0.9999;
const place = (event) => { const box = stage.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };

stage.addEventListener("wheel", (event) => {
  const [px] = place(event);
  // The page must stay scrollable: a plain wheel zooms only from the top of the page, or where zoomed already.
  const wants = event.ctrlKey || event.metaKey || isZoomed() || (event.deltaY < 0 && window.scrollY === 0);
  if (px < GUTTER || !wants) return;
  event.preventDefault();
  const span = view.to - view.from;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    const by = (event.deltaX || event.deltaY) / view.width * span;
    return zoom(view.from + by, view.to + by);
  }
  const centre = at(px), factor = Math.exp(Math.max(-120, Math.min(120, event.deltaY)) * 0.003);
  zoom(centre - (centre - view.from) * factor, centre + (view.to - centre) * factor);
}, { passive: false });

stage.addEventListener("pointerdown", (event) => {
  const [px] = place(event);
  if (px < GUTTER || event.button) return;
  stage.setPointerCapture(event.pointerId);
  view.drag = { from: px, to: px, zooms: !event.shiftKey, view: [view.from, view.to] };
});

stage.addEventListener("pointermove", (event) => {
  const [px, py] = place(event), { drag } = view;
  if (drag) {
    drag.to = Math.min(Math.max(px, GUTTER), view.width - RIGHT);
    if (!drag.zooms) {
      const by = (drag.from - px) / (view.width - GUTTER - RIGHT) * (drag.view[1] - drag.view[0]);
      zoom(drag.view[0] + by, drag.view[1] + by);
    }
  }
  const found = drag ? null : find(px, py);
  view.hover = px >= GUTTER && px <= view.width - RIGHT ? { px, ...found } : null;
  showTip(event, found && found.text);
  drawOver();
});

stage.addEventListener("pointerup", () => {
  const { drag } = view;
  view.drag = null;
  if (drag && drag.zooms && Math.abs(drag.to - drag.from) > 5) zoom(at(Math.min(drag.from, drag.to)), at(Math.max(drag.from, drag.to)));
  else drawOver();
});

stage.addEventListener("pointerleave", (event) => {
  view.hover = null;
  showTip(event, null);
  drawOver();
});

stage.addEventListener("dblclick", () => zoom(0, FULL));
document.getElementById("reset").addEventListener("click", () => zoom(0, FULL));

stage.addEventListener("keydown", (event) => {
  const span = view.to - view.from, middle = (view.from + view.to) / 2;
  const moves = {
    "0": [0, FULL], Escape: [0, FULL], "+": [middle - span / 3, middle + span / 3], "-": [middle - span * 0.75, middle + span * 0.75],
    ArrowLeft: [view.from - span / 8, view.to - span / 8], ArrowRight: [view.from + span / 8, view.to + span / 8],
  };
  if (moves[event.key]) { event.preventDefault(); zoom(...moves[event.key]); }
});
