// The columns of the table: what a run has, and how it is shown.

const STATES = {
  running: "●", finished: "✓", failed: "✕", killed: "⊘", paused: "‖", interrupted: "◐", "not begun": "○",
};
export const STATE_ORDER = Object.keys(STATES);

export const stateText = (state) => `${STATES[state] ?? "?"} ${state}`;

export function number(value) {
  if (Number.isInteger(value)) return Math.abs(value) < 1e15 ? value.toLocaleString("en-US") : String(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return size >= 1000 ? value.toFixed(0) : value.toPrecision(4);
}

export function duration(seconds) {
  if (!(seconds >= 0)) return "";
  if (seconds < 60) return `${seconds < 10 && seconds % 1 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const two = (large, unit, small, part) => (small ? `${large} ${unit} ${small} ${part}` : `${large} ${unit}`);
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return two(minutes, "min", Math.floor(seconds % 60), "s");
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? two(hours, "h", minutes % 60, "min") : two(Math.floor(hours / 24), "d", hours % 24, "h");
}

export function time(seconds) {
  const date = new Date(seconds * 1000);
  const two = (n) => String(n).padStart(2, "0");
  const clock = `${two(date.getHours())}:${two(date.getMinutes())}`;
  if (date.toDateString() === new Date().toDateString()) return clock;
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock}`;
}

export function show(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return number(value);
  return String(value);
}

export function option(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number" && !Number.isInteger(value)) return String(Number(value.toPrecision(6)));
  return String(value);
}

const FIXED = [
  { key: "name", label: "run", value: (run) => run.name, text: (v) => v },
  {
    key: "state", label: "state", value: (run) => run.state, text: stateText,
    rank: (run) => STATE_ORDER.indexOf(run.state),
  },
  { key: "since", label: "since", value: (run) => run.since, text: (v) => (v === null ? "–" : time(v)) },
  {
    key: "progress", label: "progress", numeric: true,
    value: (run) => (run.total ? run.step / run.total : null),
    text: (v) => (v === null ? "–" : `${Math.floor(100 * Math.min(v, 1))} %`),
  },
  { key: "step", label: "step", numeric: true, value: (run) => run.step },
  { key: "epoch", label: "epoch", numeric: true, value: (run) => run.epoch },
  { key: "seconds", label: "seconds", numeric: true, value: (run) => run.seconds, text: (v) => (v === null ? "–" : duration(v)) },
  { key: "started", label: "started", value: (run) => run.started, text: (v) => (v === null ? "–" : time(v)) },
  { key: "starts", label: "starts", numeric: true, value: (run) => run.starts },
  { key: "best_step", label: "best step", numeric: true, value: (run) => run.best_step },
  { key: "parameters", label: "parameters", numeric: true, value: (run) => run.parameters },
  { key: "flops", label: "FLOPs", numeric: true, value: (run) => run.flops },
  { key: "reason", label: "reason", value: (run) => run.reason || null },
];
const FIXED_BY_KEY = new Map(FIXED.map((column) => [column.key, column]));

export function column(key) {
  const fixed = FIXED_BY_KEY.get(key);
  if (fixed) return { text: show, ...fixed };
  const [kind, name] = [key.slice(0, 1), key.slice(2)];
  if (kind === "m") return { key, label: name, numeric: true, value: (run) => run.metrics[name] ?? null, text: show };
  return { key, label: name, numeric: "maybe", value: (run) => run.options[name] ?? null, text: option };
}

// Names of all metrics and options that some run has.
export function names(runs) {
  const metrics = new Set();
  const options = new Set();
  for (const run of runs) {
    for (const name in run.metrics) metrics.add(name);
    for (const name in run.options) options.add(name);
  }
  const order = (name) => ["validation", "test", "train"].indexOf(name.split(" ")[0]);
  const listed = [...metrics].sort((a, b) => order(a) - order(b) || a.localeCompare(b));
  return { fixed: FIXED.map((c) => c.key), metrics: listed, options: [...options].sort() };
}

const MOST_DIFFERING = 6;
const DULL = new Set(["hypothesis", "data_dir", "cache_dir", "runs_dir", "run_name", "best_model_dir", "random_seed", "threads"]);

// Without a choice of the user: state, results, and the options in which the runs differ.
export function defaultColumns(runs) {
  const { metrics } = names(runs);
  const accuracy = metrics.filter((name) => /^(validation|test) /.test(name) && !name.endsWith(" loss")).slice(0, 2);
  const losses = ["validation loss", "train loss"].filter((name) => metrics.includes(name));
  const chosen = ["name", "state", "since", "progress"].concat([...accuracy, ...losses].map((name) => `m:${name}`));
  const first = runs[0];
  const differing = new Set();
  if (first) {
    for (const run of runs) {
      if (run.options === first.options) continue;
      for (const name in run.options) if (run.options[name] !== first.options[name]) differing.add(name);
    }
  }
  const rank = (name) => ["model", "dataset", "optimizer", "learning_rate"].indexOf(name) + 1 || 9;
  const shown = [...differing].filter((name) => !DULL.has(name)).sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  return chosen.concat(shown.slice(0, MOST_DIFFERING).map((name) => `o:${name}`), ["seconds"]);
}
