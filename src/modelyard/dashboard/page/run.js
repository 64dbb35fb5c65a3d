// One run: progress, results, notes, options, environment, the end of its log.

import { el } from "./dom.js";
import { get, post } from "./server.js";
import { duration, names, option, show, stateText, time } from "./values.js";

const LOG_LINES = 2000;

export class RunView {
  // tell(message, isBad)
  constructor(place, tell) {
    this.place = place;
    this.tell = tell;
    this.id = null;
    this.logEnd = 0;
    this.parts = Object.fromEntries(["top", "path", "results", "notes", "log", "options", "starts"].map((name) => [name, el("div")]));
    this.pre = el("pre", { tabindex: 0, role: "log", "aria-label": "End of the log" });
    this.text = el("textarea", { rows: 3, maxLength: 10000, "aria-label": "Text of the note" });
    this.kind = el("select", { "aria-label": "Kind of note" }, ...["Note", "Hypothesis", "Conclusion"].map((kind) => el("option", {}, kind)));
    this.list = el("ul", { class: "notes" });
    this.form = el("form", { onsubmit: (event) => this.addNote(event) }, this.kind, this.text, el("button", { type: "submit" }, "Add to the journal"));
    this.parts.notes.append(el("h3", {}, "Notes"), this.list, this.form);
    this.parts.log.append(el("h3", {}, "Log"), this.pre);
    place.replaceChildren(el("div", { class: "run" },
      this.parts.top, this.parts.path,
      el("div", { class: "two" }, el("div", {}, this.parts.results, this.parts.notes), this.parts.log),
      this.parts.options, this.parts.starts));
  }

  close() {
    this.place = null;
  }

  async set(run) {
    const isNew = run.id !== this.id;
    this.run = run;
    if (isNew) {
      [this.id, this.logEnd, this.version] = [run.id, 0, null];
      this.pre.textContent = "";
      this.list.replaceChildren();
      this.parts.path.replaceChildren();
      this.parts.options.replaceChildren();
      this.parts.starts.replaceChildren();
    }
    this.form.hidden = run.remote;
    this.drawTop();
    if (this.version === run.stamp) return;
    this.version = run.stamp;
    await Promise.all([this.readDetails(), this.readLog()]);
  }

  drawTop() {
    const run = this.run;
    const since = run.since ? ` since ${time(run.since)}` : "";
    const children = [el("h2", {}, run.name), el("p", { class: `state ${run.state.replace(" ", "-")}` }, `${stateText(run.state)}${since}`)];
    if (run.reason) children.push(el("p", { class: run.state === "failed" ? "bad" : "hint" }, run.reason));
    if (run.problem) children.push(el("p", { class: "bad" }, run.problem));
    if (run.total) {
      const left = run.state === "running" && run.step > 0 && run.seconds > 0 ? (run.seconds / run.step) * (run.total - run.step) : null;
      const text = `step ${show(run.step)} of ${show(run.total)}${left ? `, about ${duration(left)} left` : ""}`;
      children.push(el("p", {}, el("progress", { max: run.total, value: Math.min(run.step, run.total), "aria-label": "Progress" }), ` ${text}`));
    }
    this.parts.top.replaceChildren(...children);
    const metrics = names([run]).metrics.map((name) => [name, run.metrics[name]]);
    this.parts.results.replaceChildren(el("h3", {}, "Results"), metrics.length
      ? el("dl", { class: "pairs" }, ...metrics.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, show(value))]))
      : el("p", { class: "hint" }, "No metrics yet."));
  }

  async readDetails() {
    const id = this.id;
    const found = await get(`/api/runs/${id}`);
    if (!this.place || this.id !== id) return;
    this.drawNotes(found.notes);
    const top = el("p", { class: "path" }, el("code", {}, found.path));
    if (found.best) top.append(` Best model: ${found.best.metric} ${show(found.best.value)} at step ${show(found.best.step)}.`);
    if (found.report) top.append(" ", el("a", { href: `/files/${id}/report.html`, target: "_blank", rel: "noopener" }, "report"));
    this.parts.path.replaceChildren(top);
    const rows = Object.entries(found.options).sort(([a], [b]) => a.localeCompare(b)).map(([name, value]) => {
      const known = Object.hasOwn(found.defaults, name);
      const changed = known && String(value) !== String(found.defaults[name]);
      return el("tr", { class: changed ? "differs" : "" }, el("th", { scope: "row" }, changed ? el("span", { title: "not the default" }, "≠ ") : null, name),
        el("td", {}, option(value)), el("td", { class: "hint" }, changed ? `default: ${option(found.defaults[name])}` : ""));
    });
    const open = this.parts.options.querySelector("details")?.open ?? false;
    this.parts.options.replaceChildren(el("details", { open }, el("summary", {}, `Options (${rows.length})`),
      el("div", { class: "scroll free", tabindex: 0 }, el("table", { class: "compare" }, el("tbody", {}, ...rows)))));
    const starts = found.starts.map((start) => el("li", {}, `${start.time}, at step ${show(start.step)}: `, el("code", {}, start.command),
      ...["versions", "hardware", "engine", "plugins"].flatMap((part) => {
        const texts = Object.entries(start[part]).map(([name, value]) => `${name} ${value}`);
        return texts.length ? [el("br"), `${part}: ${texts.join(", ")}`] : [];
      }),
      start.git_commit ? ` git ${start.git_commit}` : ""));
    const openStarts = this.parts.starts.querySelector("details")?.open ?? false;
    const sizes = Object.entries(found.sizes).map(([split, size]) => `${show(size)} ${split}`).join(", ");
    const classes = found.classes.length ? ` Classes: ${found.classes.join(", ")}${found.class_count > found.classes.length ? ` and ${found.class_count - found.classes.length} more` : ""}.` : "";
    this.parts.starts.replaceChildren(el("details", { open: openStarts }, el("summary", {}, `Starts and data (${starts.length})`),
      el("p", { class: "hint" }, sizes ? `Data: ${sizes}.${classes}` : ""), el("ol", { class: "starts" }, ...starts)));
  }

  drawNotes(notes) {
    const items = notes.filter((note) => note.text).map((note) =>
      el("li", {}, el("b", {}, note.kind === "Text" ? "Journal" : note.kind), note.time ? el("span", { class: "hint" }, ` ${note.time}`) : null, el("div", { class: "text" }, note.text),
        ["Hypothesis", "Conclusion"].includes(note.kind)
          ? el("button", { type: "button", class: "link", onclick: () => this.edit(note) }, "Edit") : null));
    this.list.replaceChildren(...(items.length ? items : [el("li", { class: "hint" }, "None yet.")]));
  }

  // The journal keeps what it has: an edited text is added below the old one.
  edit(note) {
    this.kind.value = note.kind;
    this.text.value = note.text;
    this.text.focus();
  }

  async addNote(event) {
    event.preventDefault();
    try {
      await post(`/api/runs/${this.id}/note`, { kind: this.kind.value, text: this.text.value });
      this.text.value = "";
      this.tell("The note is in the journal.");
      await this.readDetails();
    } catch (error) {
      this.tell(error.message, true);
    }
  }

  async readLog() {
    const id = this.id;
    const found = await get(`/api/runs/${id}/log?after=${this.logEnd}`);
    if (!this.place || this.id !== id) return;
    const atEnd = this.pre.scrollTop + this.pre.clientHeight >= this.pre.scrollHeight - 20;
    const text = found.start === this.logEnd && this.logEnd ? this.pre.textContent + found.text : found.text;
    if (text !== this.pre.textContent) {
      const lines = text.split("\n");
      this.pre.textContent = lines.slice(-LOG_LINES).join("\n");
      if (atEnd) this.pre.scrollTop = this.pre.scrollHeight;
    }
    if (!text) this.pre.textContent = "";
    this.logEnd = found.end;
  }
}
