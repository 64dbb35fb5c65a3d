// Options and results of the chosen runs side by side. What differs is marked.

import { el } from "./dom.js";
import { option, show, stateText } from "./values.js";

const MOST_RUNS = 30;

// A line may end after an underscore.
const breakable = (name) => name.split("_").flatMap((part, index) => (index ? ["_", el("wbr"), part] : [part]));

export function comparison(runs, onlyDifferent, change) {
  if (!runs.length) return el("p", { class: "hint" }, "Choose runs in the table to compare their options.");
  const shown = runs.slice(0, MOST_RUNS);
  const keys = [...new Set(shown.flatMap((run) => Object.keys(run.options)))];
  const metrics = [...new Set(shown.flatMap((run) => Object.keys(run.metrics)))];
  const differs = (values) => values.some((value) => value !== values[0]);
  const line = (name, values, format, marks) => {
    const other = differs(values);
    if (!other && onlyDifferent && marks) return null;
    const mark = other && marks ? el("span", { title: "differs" }, "≠ ", el("span", { class: "unseen" }, "differs: ")) : null;
    return el("tr", { class: other && marks ? "differs" : "" }, el("th", { scope: "row" }, mark, ...breakable(name)), ...values.map((value) => el("td", {}, format(value))));
  };
  const options = keys.sort().map((key) => line(key, shown.map((run) => run.options[key]), option, true)).filter(Boolean);
  const results = [
    line("state", shown.map((run) => run.state), stateText, false),
    line("step", shown.map((run) => run.step), show, false),
    ...metrics.map((key) => line(key, shown.map((run) => run.metrics[key]), show, false)),
  ];
  const head = (title) => el("tr", { class: "part" }, el("th", { scope: "colgroup", colSpan: shown.length + 1 }, title));
  const box = el("input", { type: "checkbox", id: "only-different", checked: onlyDifferent, onchange: (event) => change(event.target.checked) });
  return el("div", {},
    el("p", {}, el("label", { class: "pick" }, box, " only options that differ"),
      runs.length > MOST_RUNS ? ` The first ${MOST_RUNS} of ${runs.length} runs are shown.` : ""),
    el("div", { class: "scroll free", tabindex: 0, role: "region", "aria-label": "Options side by side" },
      el("table", { class: "compare" },
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "option"), ...shown.map((run) => el("th", { scope: "col" }, run.name)))),
        el("tbody", {}, head("Options"), ...(options.length ? options : [el("tr", {}, el("td", { colSpan: shown.length + 1 }, shown.length > 1 ? "All options are the same." : "One run is chosen: choose another one to compare."))]), head("Results"), ...results),
      )));
}
