"use strict";
// Sorting of tables.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), body = head.closest("table").tBodies[0];
    const at = head.cellIndex, way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    for (const other of head.parentNode.cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", way === 1 ? "ascending" : "descending");
    const key = (row) => {
      const cell = row.cells[at], value = cell.dataset.value;
      return value === undefined ? cell.textContent : Number(value);
    };
    const compare = (a, b) => {
      const numbers = (typeof a === "number") - (typeof b === "number");
      if (numbers) return -numbers;  // what has no number is last, either way
      return way * (typeof a === "number" ? a - b : a.localeCompare(b, undefined, {numeric: true}));
    };
    const total = body.closest(".shares") ? body.rows[body.rows.length - 1] : null;
    const rows = [...body.rows].filter((row) => row !== total);
    rows.sort((a, b) => compare(key(a), key(b)));
    body.append(...rows, ...(total ? [total] : []));
  });
}

// Runs that are shown in the curves.
const hidden = new Set();
for (const box of document.querySelectorAll("[data-toggle]")) {
  const update = () => {
    const run = Number(box.dataset.toggle);
    if (box.checked) hidden.delete(run); else hidden.add(run);
    for (const line of document.querySelectorAll(`[data-run="${run}"]`)) line.toggleAttribute("hidden", !box.checked);
  };
  box.addEventListener("change", update);
  update();  // a page that is loaded again keeps its boxes
}

// Values at a position, by pointer or by arrow keys.
const data = JSON.parse(document.getElementById("data").textContent);
const {LEFT, RIGHT, TOP, BOTTOM, WIDTH} = data.box;
const charts = new Map(data.charts.map((chart) => [chart.id, chart]));
for (const plot of document.querySelectorAll(".plot")) {
  const chart = charts.get(plot.dataset.chart), svg = plot.querySelector("svg");
  const cursor = plot.querySelector(".cursor"), output = plot.querySelector(".values");
  const ofRuns = plot.querySelector("[data-run]") !== null;
  const [low, high] = chart.x;
  const steps = [...new Set(chart.lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
  let at = -1;

  const format = (value) => Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  const hide = () => { at = -1; output.hidden = true; cursor.setAttribute("visibility", "hidden"); };
  const show = (index) => {
    at = Math.max(0, Math.min(steps.length - 1, index));
    const x = steps[at], place = LEFT + (x - low) / (high - low) * (RIGHT - LEFT);
    cursor.setAttribute("d", `M${place} ${TOP}L${place} ${BOTTOM}`);
    cursor.setAttribute("visibility", "visible");
    const head = document.createElement("div");
    head.textContent = chart.categories.length ? `${chart.label} ${chart.categories[x]}` : `${chart.label} ${x.toLocaleString("en")}`;
    output.replaceChildren(head);
    for (const line of chart.lines) {
      if (ofRuns && hidden.has(line.run)) continue;
      const near = line.points.reduce((best, point) => Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best);
      const own = near[0] !== x && !chart.categories.length ? ` (step ${near[0].toLocaleString("en")})` : "";
      if (chart.categories.length && near[0] !== x) continue;
      if (x > line.points[line.points.length - 1][0] || x < line.points[0][0]) continue;
      const row = document.createElement("div");
      row.textContent = `${format(near[1])}  ${line.name}${own}`;
      output.append(row);
    }
    output.className = `values ${place > WIDTH / 2 ? "left" : "right"}`;
    output.hidden = false;
  };
  const nearest = (x) => steps.reduce((best, step, index) => Math.abs(step - x) < Math.abs(steps[best] - x) ? index : best, 0);

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const place = (event.clientX - box.left) / box.width * WIDTH;
    show(nearest(low + (place - LEFT) / (RIGHT - LEFT) * (high - low)));
  });
  svg.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const moves = {ArrowRight: at + 1, ArrowLeft: at < 0 ? steps.length - 1 : at - 1, Home: 0, End: steps.length - 1};
    if (event.key === "Escape") hide();
    else if (event.key in moves) { event.preventDefault(); show(moves[event.key]); }
  });
}
