// The page: asks for what changed, keeps what the user chose in the address, and draws.

import { comparison } from "./compare.js";
import { Curves } from "./curves.js";
import { byId, el } from "./dom.js";
import { parse, wordsOf } from "./filter.js";
import { RunView } from "./run.js";
import { get, post } from "./server.js";
import { RunTable } from "./table.js";
import { column, defaultColumns, names } from "./values.js";

const COLUMNS = "modelyard-columns";
const TABS = ["curves", "compare", "run"];
const state = {
  runs: new Map(), version: 0, complete: false, groups: [], bin: [],
  filter: "", group: "", sort: ["since", false], columns: null, chosen: new Set(), open: null, tab: "curves",
  curves: { metrics: null, x: "step", log: false, smooth: 0 }, onlyDifferent: true,
};
let shown = [];
let view = null;
let viewTab = "";

// -- what the user chose is in the address ------------------------------------------------------------------------------

function readAddress() {
  const query = new URLSearchParams(location.hash.slice(1));
  state.filter = query.get("filter") ?? "";
  state.group = query.get("group") ?? "";
  const [key, order] = (query.get("sort") ?? "since:down").split(/:(?=[^:]*$)/);
  state.sort = [key, order === "up"];
  state.chosen = new Set((query.get("runs") ?? "").split(",").filter(Boolean));
  state.open = query.get("run");
  state.tab = TABS.includes(query.get("tab")) ? query.get("tab") : "curves";
  state.curves = {
    metrics: query.has("metrics") ? query.get("metrics").split(",").filter(Boolean) : null,
    x: ["step", "epoch", "seconds"].includes(query.get("x")) ? query.get("x") : "step",
    log: query.get("log") === "1",
    smooth: Math.min(0.99, Math.max(0, Number(query.get("smooth")) || 0)),
  };
  byId("filter").value = state.filter;
  try {
    const columns = JSON.parse(localStorage.getItem(COLUMNS));
    state.columns = Array.isArray(columns) && columns.every((key) => typeof key === "string") ? columns : null;
  } catch {
    state.columns = null;
  }
}

function writeAddress() {
  const query = new URLSearchParams();
  const { curves } = state;
  const given = {
    filter: state.filter, group: state.group, sort: `${state.sort[0]}:${state.sort[1] ? "up" : "down"}`,
    runs: [...state.chosen].join(","), run: state.open, tab: state.tab === "curves" ? "" : state.tab,
    metrics: curves.metrics?.join(","), x: curves.x === "step" ? "" : curves.x, log: curves.log ? "1" : "",
    smooth: curves.smooth ? String(curves.smooth) : "",
  };
  for (const [key, value] of Object.entries(given)) if (value && value !== "since:down") query.set(key, value);
  const hash = query.toString();
  if (hash !== location.hash.slice(1)) history.replaceState(null, "", hash ? `#${hash}` : location.pathname);
}

// -- drawing ------------------------------------------------------------------------------------------------------------

const table = new RunTable(byId("runs"), {
  choose(id, on) {
    if (on) state.chosen.add(id);
    else state.chosen.delete(id);
    draw();
  },
  chooseAll(on) {
    for (const run of shown) {
      if (on) state.chosen.add(run.id);
      else state.chosen.delete(run.id);
    }
    draw();
  },
  open(id) {
    state.open = id;
    state.tab = "run";
    draw();
    byId("chosen").scrollIntoView({ block: "start", behavior: "smooth" });
  },
  sort(key) {
    const [before, up] = state.sort;
    state.sort = [key, key === before ? !up : key === "name"];
    draw();
  },
});

function sortedRuns(runs) {
  const [key, up] = state.sort;
  const by = column(key);
  const rank = by.rank ?? by.value;
  const keyed = runs.map((run) => [rank(run), run]);
  const isEmpty = (value) => value === null || value === undefined || value === "";
  keyed.sort(([a, one], [b, other]) => {
    if (isEmpty(a) || isEmpty(b)) return isEmpty(a) - isEmpty(b);
    let order;
    if (typeof a === "number" && typeof b === "number") order = a - b;
    else if (typeof a === typeof b) order = String(a) < String(b) ? -1 : String(a) > String(b) ? 1 : 0;
    else order = typeof a === "number" ? -1 : 1;
    return (up ? order : -order) || (one.name < other.name ? -1 : 1);
  });
  return keyed.map(([, run]) => run);
}

function draw() {
  const all = [...state.runs.values()];
  const filter = parse(state.filter, all);
  byId("filter-problem").textContent = filter.problems.join("; ");
  shown = sortedRuns(all.filter((run) => (!state.group || run.group === state.group) && filter.matches(run)));
  const columns = state.columns ?? defaultColumns(all);
  table.set({ rows: shown, columns, sort: state.sort, chosen: state.chosen, open: state.tab === "run" ? state.open : null });
  const running = all.filter((run) => run.state === "running").length;
  const count = shown.length === all.length ? `${all.length} runs` : `${shown.length} of ${all.length} runs`;
  setText(byId("counts"), `${count}${running ? `, ${running} running` : ""}${state.complete ? "" : " – reading …"}`);
  drawGroups();
  drawChosen();
  writeAddress();
}

function setText(place, text) {
  if (place.textContent !== text) place.textContent = text; // what is announced must not be announced again
}

function drawGroups() {
  const key = JSON.stringify([state.groups, state.group]);
  if (key === drawGroups.known) return;
  drawGroups.known = key;
  byId("group").replaceChildren(
    el("option", { value: "" }, "All runs"),
    ...state.groups.map((group) => el("option", { value: group.id, selected: group.id === state.group }, group.name)),
  );
  byId("group").parentElement.hidden = !state.groups.length;
  const items = state.groups.filter((group) => group.pages.length || group.running).slice(0, 100).map((group) => {
    const links = group.pages.map((page) =>
      el("a", { href: `/files/${group.id}/${page}`, target: "_blank", rel: "noopener" }, page.replace(".html", "")));
    const stop = group.running
      ? el("button", { type: "button", onclick: () => confirmed(`Stop ${group.name}?`, "Its runs save and exit. The same command goes on with them later.", "Stop", () => act([[`/api/groups/${group.id}/stop`, group.name]])) }, "Stop")
      : null;
    return el("li", {}, el("b", {}, group.name), group.running ? " ● running " : " ", ...links.flatMap((link) => [link, " "]), stop);
  });
  byId("groups").replaceChildren(...items);
  byId("groups").hidden = !items.length;
}

function drawChosen() {
  const runs = [...state.chosen].map((id) => state.runs.get(id)).filter(Boolean);
  for (const tab of TABS) {
    const button = byId(`tab-${tab}`);
    button.setAttribute("aria-selected", String(tab === state.tab));
    button.tabIndex = tab === state.tab ? 0 : -1;
  }
  byId("panel").setAttribute("aria-labelledby", `tab-${state.tab}`);
  const open = state.runs.get(state.open);
  const targets = state.tab === "run" ? (open ? [open] : []) : runs;
  setText(byId("chosen-count"), state.tab === "run" ? "" : `${runs.length} chosen`);
  drawActions(targets);
  if (viewTab !== state.tab) {
    view?.close?.();
    view = null;
    viewTab = state.tab;
    byId("panel").replaceChildren();
  }
  if (state.tab === "curves") drawCurves(runs);
  else if (state.tab === "compare") drawComparison(runs);
  else drawRun(open);
}

function drawActions(runs) {
  const able = {
    Stop: runs.filter((run) => run.state === "running" && !run.remote),
    Resume: runs.filter((run) => !["running", "finished"].includes(run.state) && !run.remote),
    Delete: runs.filter((run) => run.state !== "running" && !run.remote),
  };
  const key = JSON.stringify([state.tab, Object.values(able).map((each) => each.map((run) => run.id))]);
  if (key === drawActions.known) return;
  drawActions.known = key;
  const texts = {
    Stop: ["It saves and exits.", "They save and exit."],
    Resume: ["It goes on in a process of its own, also without this dashboard.", "Each goes on in a process of its own, also without this dashboard."],
    Delete: ["It is moved to the bin, from where it can be restored.", "They are moved to the bin, from where they can be restored."],
  };
  const buttons = Object.entries(able).map(([name, own]) => {
    const listed = own.slice(0, 5).map((run) => run.name).join(", ") + (own.length > 5 ? ` and ${own.length - 5} more` : "");
    const title = `${name} ${own.length === 1 ? listed : `${own.length} runs`}?`;
    const run = () => confirmed(title, own.length === 1 ? texts[name][0] : `${listed}. ${texts[name][1]}`, name, () => act(own.map((each) => [`/api/runs/${each.id}/${name.toLowerCase()}`, each.name])));
    return el("button", { type: "button", disabled: !own.length, class: name === "Delete" ? "danger" : "", onclick: run }, own.length > 1 ? `${name} (${own.length})` : name);
  });
  byId("actions").replaceChildren(...buttons);
}

function drawCurves(runs) {
  const { metrics } = names([...(runs.length ? runs : state.runs.values())]);
  const usual = metrics.filter((name) => /^validation /.test(name) && !/ loss$/.test(name)).slice(0, 1)
    .concat(["train loss", "validation loss"].filter((name) => metrics.includes(name)));
  view ??= new Curves(byId("panel"), (settings) => {
    state.curves = settings;
    draw();
  });
  const settings = { ...state.curves, metrics: state.curves.metrics ?? usual };
  view.set({ runs, metrics, settings }).catch((error) => tell(error.message, true));
}

function drawComparison(runs) {
  const key = JSON.stringify([runs.map((run) => [run.id, run.stamp]), state.onlyDifferent]);
  if (key === view?.key) return;
  const place = comparison(runs, state.onlyDifferent, (on) => {
    state.onlyDifferent = on;
    draw();
    byId("only-different").focus();
  });
  byId("panel").replaceChildren(place);
  view = { key };
}

function drawRun(run) {
  if (!run) {
    view?.close?.();
    view = null;
    byId("panel").replaceChildren(el("p", { class: "hint" }, state.open && state.complete ? "This run is not there any more." : "Click the name of a run in the table."));
    return;
  }
  view ??= new RunView(byId("panel"), tell);
  view.set(run).catch((error) => error.status !== 404 && tell(error.message, true));
}

// -- changing -----------------------------------------------------------------------------------------------------------

function tell(text, isBad = false) {
  const place = byId("message");
  place.textContent = text;
  place.className = isBad ? "message bad" : "message";
  place.hidden = !text;
  clearTimeout(tell.timer);
  if (!isBad) tell.timer = setTimeout(() => (place.hidden = true), 6000);
}

function dialog(title, ...children) {
  const place = byId("dialog");
  place.replaceChildren(el("h2", { id: "dialog-title" }, title), ...children);
  place.showModal();
  return place;
}

function confirmed(title, text, name, then) {
  const close = () => byId("dialog").close();
  dialog(title, el("p", {}, text), el("p", { class: "buttons" },
    el("button", { type: "button", onclick: close }, "Cancel"),
    el("button", { type: "button", class: "primary", autofocus: true, onclick: () => { close(); then(); } }, name)));
}

async function act(requests) {
  const problems = [];
  let last = "";
  for (const [path, name] of requests) {
    try {
      last = `${name}: ${(await post(path)).done}`;
    } catch (error) {
      problems.push(error.message);
    }
  }
  if (problems.length) tell(problems.slice(0, 5).join(" "), true);
  else tell(requests.length > 1 ? `Done for ${requests.length} runs.` : last);
  await update();
}

function chooseColumns() {
  const all = [...state.runs.values()];
  const { fixed, metrics, options } = names(all);
  const groups = [["Run", fixed], ["Metrics", metrics.map((name) => `m:${name}`)], ["Options", options.map((name) => `o:${name}`)]];
  const chosen = new Set(state.columns ?? defaultColumns(all));
  const boxes = [];
  const parts = groups.map(([title, keys]) => el("fieldset", {}, el("legend", {}, title), ...keys.map((key) => {
    const box = el("input", { type: "checkbox", checked: chosen.has(key), disabled: key === "name", value: key });
    const label = el("label", { class: "pick" }, box, ` ${column(key).label}`);
    boxes.push([key, box, label]);
    return label;
  })));
  const search = el("input", {
    type: "search", placeholder: "Search columns", "aria-label": "Search columns",
    oninput: () => boxes.forEach(([key, , label]) => (label.hidden = !key.toLowerCase().includes(search.value.toLowerCase()))),
  });
  const place = byId("dialog");
  const apply = (columns) => {
    state.columns = columns;
    if (columns) localStorage.setItem(COLUMNS, JSON.stringify(columns));
    else localStorage.removeItem(COLUMNS);
    place.close();
    draw();
  };
  dialog("Columns", search, el("div", { class: "columns" }, ...parts), el("p", { class: "buttons" },
    el("button", { type: "button", onclick: () => place.close() }, "Cancel"),
    el("button", { type: "button", onclick: () => apply(null) }, "Default"),
    el("button", {
      type: "button", class: "primary",
      onclick: () => apply(boxes.filter(([, box]) => box.checked).map(([key]) => key)),
    }, "Show")));
}

function showBin() {
  const items = state.bin.map((one) => el("li", {}, one.name, " ", el("button", {
    type: "button",
    onclick: () => { byId("dialog").close(); act([[`/api/bin/${one.id}/restore`, one.name]]); },
  }, "Restore")));
  dialog("Bin", el("p", { class: "hint" }, "Deleted runs are in the folder .bin beside the others. To delete them for ever, remove it yourself."),
    el("ul", { class: "bin" }, ...items), el("p", { class: "buttons" }, el("button", { type: "button", onclick: () => byId("dialog").close() }, "Close")));
}

// -- what changed -------------------------------------------------------------------------------------------------------

function take(changes) {
  for (const sent of changes.runs) {
    const options = { ...changes.base, ...sent.options };
    for (const name of sent.without) delete options[name];
    const run = { ...sent, options, stamp: changes.version };
    run.words = wordsOf(run);
    state.runs.set(run.id, run);
  }
  for (const id of changes.gone) state.runs.delete(id);
  Object.assign(state, { version: changes.version, complete: changes.complete, groups: changes.groups, bin: changes.bin });
  byId("bin").hidden = !state.bin.length;
  setText(byId("bin"), `Bin (${state.bin.length})`);
  if (changes.problem) tell(changes.problem, true);
}

async function update() {
  const changes = await get(`/api/runs?since=${state.version}`);
  const key = JSON.stringify([changes.groups, changes.bin, changes.complete]);
  const isNews = changes.runs.length || changes.gone.length || key !== update.known;
  update.known = key;
  take(changes);
  if (isNews) draw();
}

async function watch() {
  let wasLost = false;
  for (;;) {
    try {
      await update();
      if (wasLost) tell("");
      wasLost = false;
    } catch (error) {
      wasLost = true;
      if (error.status === 401) state.version = 0;
      tell(error.status === 401 ? "The dashboard was started again. Open the address that it printed." : error.message, true);
    }
    const pause = wasLost ? 3000 : !state.complete ? 250 : document.hidden ? 10000 : 1000;
    await new Promise((done) => setTimeout(done, pause));
  }
}

// -- events -------------------------------------------------------------------------------------------------------------

byId("filter").addEventListener("input", (event) => {
  state.filter = event.target.value;
  byId("runs").scrollTop = 0;
  draw();
});
byId("group").addEventListener("change", (event) => {
  state.group = event.target.value;
  draw();
});
byId("columns").addEventListener("click", chooseColumns);
byId("bin").addEventListener("click", showBin);
byId("tabs").addEventListener("click", (event) => {
  const tab = event.target.id.replace("tab-", "");
  if (TABS.includes(tab)) {
    state.tab = tab;
    draw();
  }
});
byId("tabs").addEventListener("keydown", (event) => {
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!move) return;
  state.tab = TABS[(TABS.indexOf(state.tab) + move + TABS.length) % TABS.length];
  draw();
  byId(`tab-${state.tab}`).focus();
});
addEventListener("hashchange", () => {
  readAddress();
  draw();
});
matchMedia("(prefers-color-scheme:dark)").addEventListener("change", draw);

readAddress();
watch();
