// Curves of the chosen runs, laid over each other: one chart per metric.

import { el, svg } from "./dom.js";
import { get } from "./server.js";
import { duration, show } from "./values.js";

/* global uPlot */

export const MOST_RUNS = 20;
const COLOURS = ["#3b76c4", "#d9822b", "#2c9c69", "#c9485b", "#8661c1", "#8a6d3b", "#d269a8", "#4aa3b0"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const COMPACT = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 4 });
const SECONDS = [0.1, 0.5, 1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30, 60, 120, 360, 720].map((minutes) => 60 * minutes), ...[1, 2, 5, 10, 20, 50].map((days) => 86400 * days)];
const MOST_FAINT = 10;
const dark = matchMedia("(prefers-color-scheme:dark)");

const look = (index) => ({
  colour: COLOURS[index % COLOURS.length],
  dash: DASHES[Math.floor(index / COLOURS.length + index) % DASHES.length],
});

// An exponential mean whose first values are not drawn to zero.
export function smoothed(values, weight) {
  let [mean, total] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function sample(index) {
  const { colour, dash } = look(index);
  const line = svg("line", { x1: 0, y1: 5, x2: 28, y2: 5, stroke: colour, "stroke-width": 2.5, "stroke-dasharray": dash.join(" ") });
  const made = svg("svg", { width: 28, height: 10, "aria-hidden": "true" });
  made.append(line);
  return made;
}

export class Curves {
  // settings: metrics, x, log, smooth; change(settings)
  constructor(place, change) {
    this.place = place;
    this.change = change;
    this.charts = [];
    this.data = {};
    this.asked = "";
    this.controls = el("div", { class: "bar controls" });
    this.legend = el("ul", { class: "legend", "aria-label": "Lines of the runs" });
    this.note = el("p", { class: "hint", role: "status" });
    this.grid = el("div", { class: "charts" });
    place.replaceChildren(this.controls, this.legend, this.note, this.grid);
    this.resized = new ResizeObserver(() => this.fit());
    this.resized.observe(this.grid);
  }

  close() {
    this.resized.disconnect();
    this.charts.forEach((one) => one.chart?.destroy());
    this.charts = [];
    this.place = null;
  }

  // Draws the controls anew only if the choice of metrics changes: a control that is used keeps the focus.
  async set({ runs, metrics, settings }) {
    this.runs = runs.slice(0, MOST_RUNS);
    this.left = runs.length - this.runs.length;
    this.settings = settings;
    const key = JSON.stringify(metrics);
    if (key !== this.known) {
      this.known = key;
      this.drawControls(metrics);
    }
    const wanted = this.runs.map((run) => `${run.id}:${run.changed}:${run.step}`).join() + settings.metrics.join();
    if (wanted === this.asked) this.draw();
    else {
      this.asked = wanted;
      await this.read();
    }
  }

  drawControls(metrics) {
    const picks = metrics.map((name) =>
      el("label", { class: "pick" }, el("input", {
        type: "checkbox", checked: this.settings.metrics.includes(name),
        onchange: (event) => {
          const others = this.settings.metrics.filter((each) => each !== name);
          this.change({ ...this.settings, metrics: event.target.checked ? [...others, name] : others });
        },
      }), ` ${name}`));
    const x = el("select", { onchange: (event) => this.change({ ...this.settings, x: event.target.value }) },
      ...[["step", "step"], ["epoch", "epoch"], ["seconds", "time"]].map(([value, text]) => el("option", { value, selected: this.settings.x === value }, text)));
    const log = el("input", { type: "checkbox", checked: this.settings.log, onchange: (event) => this.change({ ...this.settings, log: event.target.checked }) });
    const shown = el("output", {}, this.settings.smooth.toFixed(2));
    const smooth = el("input", {
      type: "range", min: 0, max: 0.99, step: 0.01, value: this.settings.smooth,
      oninput: (event) => {
        shown.textContent = Number(event.target.value).toFixed(2);
        this.change({ ...this.settings, smooth: Number(event.target.value) });
      },
    });
    this.controls.replaceChildren(
      el("details", { class: "metrics" }, el("summary", {}, "Metrics"), el("div", { class: "picks" }, ...picks)),
      el("label", {}, "x ", x),
      el("label", { class: "pick" }, log, " log y"),
      el("label", { class: "pick" }, "smoothing ", smooth, " ", shown),
    );
  }

  async read() {
    if (!this.runs.length || !this.settings.metrics.length) {
      this.data = {};
      this.draw();
      return;
    }
    const query = new URLSearchParams({ points: 600 });
    this.runs.forEach((run) => query.append("run", run.id));
    this.settings.metrics.forEach((name) => query.append("metric", name));
    const asked = this.asked;
    for (;;) {
      const found = await get(`/api/curves?${query}`);
      if (this.asked !== asked || !this.place) return;
      this.data = found;
      const unread = Object.values(found).filter((one) => one.read < one.size);
      this.draw();
      const before = unread.reduce((sum, one) => sum + one.read, 0);
      // The last line of a file may be half written; what can be read is read by then.
      if (!unread.length || before === this.before) break;
      this.before = before;
    }
    this.before = undefined;
  }

  draw() {
    if (!this.place) return;
    const { metrics } = this.settings;
    this.legend.replaceChildren(...this.runs.map((run, index) => el("li", {}, sample(index), " ", run.name)));
    const size = Object.values(this.data).reduce((sum, one) => sum + one.size, 0);
    const read = Object.values(this.data).reduce((sum, one) => sum + one.read, 0);
    const notes = [];
    if (!this.runs.length) notes.push("Choose runs in the table to lay their curves over each other.");
    else if (!metrics.length) notes.push("Choose a metric.");
    if (this.left > 0) notes.push(`The first ${MOST_RUNS} of the chosen runs are drawn; ${this.left} are not.`);
    if (size > 1e6 && read < 0.98 * size) notes.push(`${Math.floor((100 * read) / size)} % of the metrics are read.`);
    const merged = Math.max(1, ...Object.values(this.data).flatMap((one) => Object.values(one.curves).map((c) => c.rows)));
    if (merged > 1) notes.push(`A point is the mean of up to ${merged} rows; the band is their range.`);
    if (this.note.textContent !== notes.join(" ")) this.note.textContent = notes.join(" ");
    const figures = this.runs.length ? metrics.map((name) => this.figure(name)) : [];
    const key = JSON.stringify([figures.map((one) => one.key), this.settings, dark.matches]);
    if (key === this.drawn) {
      figures.forEach((one, index) => this.renew(index, one));
      return;
    }
    this.drawn = key;
    this.charts.forEach((one) => one.chart?.destroy());
    this.charts = figures.map((one) => {
      const place = el("div", { class: "plot", role: "img", "aria-label": one.label });
      return { place, figure: el("figure", {}, el("figcaption", {}, one.name), place), last: one.last };
    });
    this.grid.replaceChildren(...this.charts.map((one) => one.figure));
    figures.forEach((one, index) => {
      const { place } = this.charts[index];
      if (one.series) this.charts[index].chart = this.plot(place, one, this.charts[index]);
      else place.append(el("p", { class: "hint" }, "No values yet."));
    });
  }

  // New values in a chart that is there: what is zoomed stays so, and the pointer keeps its place.
  renew(index, { data, label, last }) {
    const { chart, place } = this.charts[index];
    place.setAttribute("aria-label", label);
    if (!chart) return;
    const [before, { min, max }] = [chart.data[0], chart.scales.x];
    const isZoomed = min > before[0] || max < before[before.length - 1];
    this.charts[index].last = last;
    chart.setData(data, !isZoomed);
    if (isZoomed) chart.redraw();
  }

  // What a chart shows: its lines and bands, and the same in words.
  figure(name) {
    const own = this.runs
      .map((run, index) => ({ run, index, curve: this.data[run.id]?.curves[name] }))
      .filter((one) => one.curve?.mean.some((value) => value !== null));
    if (!own.length) return { name, label: `${name}: no values yet`, key: [name], last: [] };
    const { x, log, smooth } = this.settings;
    const ends = own.map(({ run, curve }) => `${run.name} ends at ${show(curve.mean.findLast((value) => value !== null))}`);
    const label = `${name} against ${x === "seconds" ? "time" : x}: ${ends.join("; ")}`;
    const last = [null];
    const tables = [];
    const series = [{ label: x === "seconds" ? "time" : x }];
    const bands = [];
    const positive = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
    for (const { run, index, curve } of own) {
      const { colour, dash } = look(index);
      // Times and steps grow; what does not, after a resume with another clock, is left out.
      const order = curve[x].map((value, i) => i).filter((i) => curve[x][i] !== null).sort((a, b) => curve[x][a] - curve[x][b])
        .filter((i, n, all) => n === 0 || curve[x][i] > curve[x][all[n - 1]]);
      const axis = order.map((i) => curve[x][i]);
      const picked = (values) => positive(order.map((i) => values[i]));
      const alone = axis.length === 1;
      const raw = picked(curve.mean);
      if (smooth > 0 && own.length <= MOST_FAINT) {
        tables.push([axis, raw]);
        series.push({ label: "", stroke: `${colour}55`, width: 1, points: { show: false }, spanGaps: true, faint: true });
        last.push(null);
      }
      if (curve.low && smooth === 0 && own.length <= MOST_FAINT) {
        tables.push([axis, picked(curve.high)], [axis, picked(curve.low)]);
        const edge = { label: "", stroke: "transparent", points: { show: false }, spanGaps: true, faint: true };
        series.push(edge, { ...edge });
        last.push(null, null);
        bands.push({ series: [series.length - 2, series.length - 1], fill: `${colour}33` });
      }
      tables.push([axis, smooth > 0 ? smoothed(raw, smooth) : raw]);
      series.push({ label: run.name, stroke: colour, dash, width: 2, spanGaps: true, points: { show: alone, size: 8, fill: colour } });
      last.push(raw.findLast((each) => each !== null));
    }
    const key = [name, series.map((one) => [one.label, one.stroke, one.points?.show]), bands.length];
    return { name, label, last, series, bands, data: uPlot.join(tables), key };
  }

  plot(place, { series, bands, data }, kept) {
    const { x, log } = this.settings;
    const style = getComputedStyle(document.documentElement);
    const [ink, line] = [style.getPropertyValue("--faint"), style.getPropertyValue("--line")];
    const shown = (v) => (x === "seconds" ? duration(v) : show(v));
    // Without a pointer, the last value.
    const value = (_, v, index, at) => {
      if (at === null || at === undefined) return index === 0 ? "last" : show(kept.last[index]);
      return v === null || v === undefined ? "–" : index === 0 ? shown(v) : show(v);
    };
    const format = (_, splits) => splits.map((value) => (value === null ? "" : x === "seconds" ? duration(value) : value >= 1e4 ? COMPACT.format(value) : String(value)));
    const values = (_, splits) => splits.map((value) => (value === null ? "" : Math.abs(value) >= 1e5 ? COMPACT.format(value) : value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(0) : String(Number(value.toPrecision(6)))));
    // Of a logarithmic axis over many decades, only the decades have lines.
    const filter = (_, splits) => (splits.length > 20 ? splits.map((v) => (Number.isInteger(Math.round(1e9 * Math.log10(v)) / 1e9) ? v : null)) : splits);
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "12px system-ui, sans-serif" };
    const upright = log ? { ...axis, grid: { ...axis.grid, filter }, ticks: { ...axis.ticks, filter } } : axis;
    const chart = new uPlot({
      width: Math.max(place.clientWidth, 200), height: 240,
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
      axes: [{ ...axis, values: format, ...(x === "seconds" ? { space: 80, incrs: SECONDS } : { space: 60 }) }, { ...upright, values, size: 62 }],
      cursor: { sync: { key: `x-${x}`, setSeries: false }, points: { size: 6 } },
      legend: { live: true }, series: series.map((one) => ({ ...one, value })), bands,
    }, data, place);
    // The legend under a chart shows the values at the pointer; helper lines are not listed.
    [...chart.root.querySelectorAll(".u-legend .u-series")].forEach((row, index) => (row.hidden = Boolean(series[index].faint)));
    return chart;
  }

  fit() {
    for (const { chart } of this.charts) {
      if (!chart) continue;
      const width = chart.root.parentElement.clientWidth;
      if (width > 0 && Math.abs(width - chart.width) > 2) chart.setSize({ width, height: chart.height });
    }
  }
}
