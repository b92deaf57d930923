// Legend, rank selector, and the two smaller charts, all for the main timeline. Then everything is drawn.

function drawLegend() {
  const legend = document.getElementById("legend");
  legend.textContent = "";
  const entry = (text, paint) => {
    const box = document.createElement("span"), canvas = document.createElement("canvas");
    const pen = fit(canvas, 14, 14);
    paint(pen);
    box.append(canvas, text);
    legend.append(box);
  };
  const solid = (colour) => (pen) => { pen.fillStyle = colour; pen.fillRect(0, 0, 14, 14); };
  const owners = new Set(TIMELINES.flatMap((timeline) => timeline.ranks.flatMap((rank) => [...rank.byOwner.keys()])));
  const lead = document.createElement("span");
  lead.textContent = MAIN.sendsTiles ? "Tiles for" : "Rows of";
  if (owners.size) legend.append(lead);
  for (const owner of [...owners].sort((a, b) => a - b)) entry(`rank ${owner}`, solid(colourOf(owner)));
  const finish = (colour) => (pen) => { solid(colourOf(0))(pen); pen.fillStyle = colour; pen.fillRect(9, 0, 5, 14); };
  entry("waiting", (pen) => solid(hatch(pen))(pen));
  entry(MAIN.sendsTiles ? "sending" : "storing", finish(edgeOf(0)));
  if (MAIN.sendsTiles && MAIN.sumsTiles) entry("summing", finish(theme.sum));
  if (MAIN.transfers.length) entry("chunk arrives", (pen) => {
    pen.fillStyle = theme.soft;
    pen.beginPath();
    pen.moveTo(2, 3);
    pen.lineTo(12, 3);
    pen.lineTo(7, 12);
    pen.fill();
  });
}

function drawSelector() {
  const box = document.getElementById("ranks");
  box.textContent = "";
  const ranks = [...new Set(TIMELINES.flatMap((timeline) => timeline.ranks.map((rank) => rank.rank)))];
  if (ranks.length < 2) return;
  const choose = (text, rank) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.setAttribute("aria-pressed", String(view.rank === rank));
    button.addEventListener("click", () => { view.rank = rank; drawAll(); });
    box.append(button);
  };
  choose("all ranks", null);
  for (const rank of ranks.sort((a, b) => a - b)) choose(ranks.length > 8 ? `${rank}` : `rank ${rank}`, rank);
}

// Mean over the units: what waiting for this chunk cost each of them.
function waitBars() {
  const sums = new Map(), ranks = shownRanks(MAIN);
  for (const rank of ranks) {
    for (const [owner, chunk, us] of rank.waits) {
      const after = ranks.length > 1 ? owner : (owner - rank.rank + MAIN.world) % MAIN.world;
      const key = `${owner}/${chunk}`, bar = sums.get(key) || { owner, chunk, after, us: 0 };
      bar.us += us / rank.units / ranks.length;
      sums.set(key, bar);
    }
  }
  return [...sums.values()].sort((a, b) => a.after - b.after || a.chunk - b.chunk);
}

function drawWaits() {
  const canvas = document.getElementById("waits"), width = canvas.clientWidth, height = 170;
  const pen = fit(canvas, width, height), bars = waitBars();
  const unit = MAIN.unitWord, left = 52, bottom = height - 34, top = 12;
  const total = bars.reduce((sum, bar) => sum + bar.us, 0);
  document.getElementById("waits-note").textContent =
    `mean per ${unit}, ${time(total)} in all` + (MAIN.sendsTiles ? "; for a free slot at the owner" : "");
  pen.textBaseline = "middle";
  const most = Math.max(...bars.map((bar) => bar.us), 0.01);
  const { found, step } = ticks(0, most, 4);
  for (const tick of bars.length ? found : []) {
    const y = bottom - tick / most * (bottom - top);
    pen.fillStyle = theme.grid;
    pen.fillRect(left, Math.round(y), width - left, 1);
    const label = tick.toFixed(step < 0.01 ? 3 : step < 0.1 ? 2 : step < 1 ? 1 : 0);
    if (tick) words(pen, `${label} µs`, left - 8, y, { align: "right", size: 11 });
  }
  const groups = [...new Set(bars.map((bar) => bar.owner))];
  const space = (width - left) / Math.max(1, bars.length + groups.length * 0.7);
  const thick = Math.min(space * 0.86, 56);
  let px = left + space * 0.35;
  for (const owner of groups) {
    const own = bars.filter((bar) => bar.owner === owner), begin = px;
    for (const bar of own) {
      const tall = Math.max(1, bar.us / most * (bottom - top));
      pen.fillStyle = colourOf(owner);
      pen.fillRect(px + (space - thick) / 2, bottom - tall, thick, tall);
      if (space > 12) words(pen, `${bar.chunk}`, px + space / 2, bottom + 9, { align: "center", size: 11 });
      px += space;
    }
    const name = space * own.length > 42 ? `rank ${owner}` : `${owner}`;
    words(pen, name, (begin + px) / 2, bottom + 25, { align: "center", weight: 600, colour: theme.ink });
    px += space * 0.7;
  }
  if (!bars.length) words(pen, "No tile was recorded.", left + 8, height / 2);
  else words(pen, "chunk", left - 8, bottom + 9, { align: "right", size: 11 });
}

function drawShares() {
  const ranks = shownRanks(MAIN), all = ranks.reduce((sum, rank) => sum + rank.units, 0) || 1;
  document.getElementById("shares-of").textContent = (all === 1 ? "" : `${all} `) + unitWord(MAIN, all);
  const mean = [0, 1, 2].map((state) => ranks.reduce((sum, rank) => sum + rank.units * rank.total[state], 0) / all);
  const finishing = !MAIN.sendsTiles ? "storing" : MAIN.sumsTiles ? "sending, summing" : "sending";
  const parts = [
    ["computing", mean[0], theme.computing], [finishing, mean[1], theme.finishing],
    ["waiting", mean[2], null], ["no tile", Math.max(0, 1 - mean[0] - mean[1] - mean[2]), theme.line],
  ];
  const bar = parts.map(([, share, colour]) =>
    `<i ${colour ? "" : 'class="hatched"'} style="width:${100 * share}%;${colour ? "background:" + colour : ""}"></i>`).join("");
  const words = parts.map(([name, share, colour]) => `<span style="--c:${colour || theme.hatch}"><b>${percent(share)}</b> ${name}</span>`).join("");
  document.getElementById("shares").innerHTML = `<div class="stack">${bar}</div><div class="parts">${words}</div>`;
}

function drawAll() {
  readTheme();
  view.hover = null;
  tip.style.visibility = "hidden";
  view.width = stage.clientWidth;
  drawLegend();
  drawSelector();
  layOut();
  draw();
  drawWaits();
  drawShares();
}

const sizes = TIMELINES.map((timeline) => timeline.ranks.reduce((sum, rank) => sum + rank.rows.length, 0));
// Every rank at once is the better picture as long as its rows can be told apart.
if (Math.max(...sizes, 0) > 160 && MAIN.ranks.length > 1) view.rank = MAIN.ranks[0].rank;
view.to = FULL;
document.getElementById("reset").disabled = true;
let pending = 0;
window.addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(drawAll); });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
