// The table of runs. Only the rows that are in view are in the document, so thousands of runs cost as much as thirty.

import { el } from "./dom.js";
import { column } from "./values.js";

const ROW = 36;
const BEYOND = 8;
const SAMPLE = 400;

export class RunTable {
  // actions: choose(id, on), open(id), sort(key)
  constructor(place, actions) {
    this.place = place;
    this.actions = actions;
    this.rows = [];
    this.columns = [];
    this.chosen = new Set();
    this.focused = -1;
    this.shown = [-1, -1];
    this.colgroup = el("colgroup");
    this.head = el("thead");
    this.body = el("tbody");
    this.table = el("table", {}, el("caption", { class: "unseen" }, "Runs"), this.colgroup, this.head, this.body);
    place.replaceChildren(this.table);
    place.addEventListener("scroll", () => this.draw(), { passive: true });
    place.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.draw(true)).observe(place);
  }

  set({ rows, columns, sort, chosen, open }) {
    const widths = JSON.stringify(columns) !== JSON.stringify(this.columns.map((c) => c.key)) || this.rows.length !== rows.length;
    this.rows = rows;
    this.chosen = chosen;
    this.open = open;
    this.sort = sort;
    if (this.focused >= rows.length) this.focused = rows.length - 1;
    if (widths) {
      this.columns = columns.map(column);
      this.measure();
    }
    this.drawHead();
    this.table.setAttribute("aria-rowcount", rows.length + 1);
    this.draw(true);
  }

  // Widths come from the texts, so that columns do not jump while rows are scrolled.
  measure() {
    const step = Math.max(1, Math.floor(this.rows.length / SAMPLE));
    const narrow = matchMedia("(max-width:600px)").matches;
    const most = narrow ? 20 : 34;
    let total = 0;
    const widths = this.columns.map((shown, index) => {
      let longest = Math.max(shown.label.length * (narrow ? 0.8 : 1.05) + 3, shown.key === "progress" ? 12 : 0);
      for (let i = 0; i < this.rows.length; i += step) {
        longest = Math.max(longest, shown.text(shown.value(this.rows[i])).length);
      }
      const width = Math.ceil(Math.min(longest, index ? most : most + 4) * 7.4 + 22);
      total += width;
      return width;
    });
    const cols = [el("col"), ...widths.map(() => el("col"))];
    [36, ...widths].forEach((width, index) => (cols[index].style.width = `${width}px`));
    this.table.style.width = `${total + 36}px`;
    this.colgroup.replaceChildren(...cols);
  }

  drawHead() {
    const all = this.rows.length > 0 && this.rows.every((run) => this.chosen.has(run.id));
    const box = el("input", {
      type: "checkbox", checked: all, "aria-label": "Choose all runs that are shown",
      onchange: (event) => this.actions.chooseAll(event.target.checked),
    });
    const heads = this.columns.map((shown) => {
      const [key, up] = this.sort;
      const sorted = key === shown.key ? (up ? "ascending" : "descending") : undefined;
      const arrow = sorted ? (up ? " ↑" : " ↓") : "";
      const button = el("button", { type: "button", title: shown.label, onclick: () => this.actions.sort(shown.key) }, shown.label + arrow);
      return el("th", { scope: "col", "aria-sort": sorted, class: shown.numeric === true ? "number" : "" }, button);
    });
    this.head.replaceChildren(el("tr", { "aria-rowindex": 1 }, el("th", { scope: "col" }, box), ...heads));
  }

  draw(all = false) {
    const first = Math.max(0, Math.floor(this.place.scrollTop / ROW) - BEYOND);
    const last = Math.min(this.rows.length, Math.ceil((this.place.scrollTop + this.place.clientHeight) / ROW) + BEYOND);
    if (!all && first === this.shown[0] && last === this.shown[1]) return;
    this.shown = [first, last];
    const hadFocus = this.body.contains(document.activeElement) ? document.activeElement : null;
    const focusedId = hadFocus?.closest("tr")?.dataset.id;
    const kind = hadFocus?.dataset.kind;
    const rows = [this.spacer(first)];
    for (let index = first; index < last; index++) rows.push(this.row(this.rows[index], index));
    rows.push(this.spacer(this.rows.length - last));
    if (!this.rows.length) {
      rows.push(el("tr", {}, el("td", { class: "none", colSpan: this.columns.length + 1 }, "No runs here.")));
    }
    this.body.replaceChildren(...rows);
    if (focusedId) {
      const again = [...this.body.rows].find((row) => row.dataset.id === focusedId);
      again?.querySelector(`[data-kind=${kind}]`)?.focus({ preventScroll: true });
    }
  }

  spacer(count) {
    const row = el("tr", { class: "spacer", "aria-hidden": "true" }, el("td", { colSpan: this.columns.length + 1 }));
    row.style.height = `${count * ROW}px`;
    row.hidden = count <= 0;
    return row;
  }

  row(run, index) {
    const chosen = this.chosen.has(run.id);
    const box = el("input", {
      type: "checkbox", checked: chosen, "aria-label": `Choose ${run.name}`, "data-kind": "box",
      onchange: (event) => this.actions.choose(run.id, event.target.checked),
    });
    const cells = this.columns.map((shown) => {
      const text = shown.text(shown.value(run));
      if (shown.key === "name") {
        const open = el("button", { type: "button", class: "link", title: text, "data-kind": "open", onclick: () => this.actions.open(run.id) }, text);
        return el("th", { scope: "row" }, open);
      }
      if (shown.key === "state") return el("td", { class: `state ${run.state.replace(" ", "-")}`, title: run.reason || run.problem || run.state }, text);
      if (shown.key === "progress" && run.total && run.state !== "finished") {
        return el("td", { class: "number" }, el("progress", { max: run.total, value: Math.min(run.step, run.total), "aria-label": `${run.name}: ${text}` }), ` ${text}`);
      }
      const isNumber = shown.numeric === true || typeof shown.value(run) === "number";
      return el("td", { class: isNumber && shown.numeric ? "number" : "", title: text.length > 20 ? text : undefined }, text);
    });
    return el(
      "tr",
      { "data-id": run.id, "aria-rowindex": index + 2, class: `${chosen ? "chosen" : ""} ${run.id === this.open ? "open" : ""}` },
      el("td", {}, box), ...cells,
    );
  }

  press(event) {
    const id = event.target.closest?.("tr")?.dataset.id;
    if (event.key === " " && event.target.dataset?.kind === "open") {
      event.preventDefault();
      this.actions.choose(id, !this.chosen.has(id));
      return;
    }
    const keys = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 };
    if (!(event.key in keys)) return;
    event.preventDefault();
    const current = this.rows.findIndex((run) => run.id === id);
    const from = current >= 0 ? current : this.focused;
    this.focus(Math.max(0, Math.min(this.rows.length - 1, from + keys[event.key])), event.target.dataset?.kind);
  }

  focus(index, kind = "open") {
    if (index < 0) return;
    this.focused = index;
    const [top, height] = [index * ROW, this.place.clientHeight - 2 * ROW];
    if (top < this.place.scrollTop) this.place.scrollTop = top;
    else if (top > this.place.scrollTop + height - ROW) this.place.scrollTop = top - height + ROW;
    this.draw();
    const row = [...this.body.rows].find((each) => each.dataset.id === this.rows[index].id);
    row?.querySelector(`[data-kind=${kind}]`)?.focus({ preventScroll: true });
  }
}
