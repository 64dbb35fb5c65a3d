// The filter: words that a run must have, and conditions such as accuracy>0.9. All of them must hold.

import { STATE_ORDER } from "./values.js";

const PART = /(-?)(?:([^\s"=<>!~]+)(!=|>=|<=|=|>|<|~))?(?:"([^"]*)"?|(\S+))/g;
const FIELDS = {
  name: "name", run: "name", state: "state", step: "step", epoch: "epoch", seconds: "seconds", starts: "starts",
  parameters: "parameters", flops: "flops", best_step: "best_step", reason: "reason",
};

// Returns the value of a run by the name that a user types: validation.accuracy, accuracy, optimizer, state.
export function valueOf(run, name) {
  const key = name.replace(/-/g, "_");
  if (key in FIELDS) return run[FIELDS[key]];
  if (key === "progress") return run.total ? run.step / run.total : undefined;
  if (Object.hasOwn(run.options, key)) return run.options[key];
  const spaced = key.replace(".", " ");
  if (Object.hasOwn(run.metrics, spaced)) return run.metrics[spaced];
  for (const split of ["validation", "test", "train"]) {
    const metric = `${split} ${key}`;
    if (Object.hasOwn(run.metrics, metric)) return run.metrics[metric];
  }
  return undefined;
}

function isKnown(runs, name) {
  return name === "progress" || name.replace(/-/g, "_") in FIELDS || runs.some((run) => valueOf(run, name) !== undefined);
}

function compares(value, sign, wanted) {
  if (value === undefined) return sign === "!=";
  const text = value === null ? "none" : String(value);
  const [a, b] = [Number(text), Number(wanted)];
  const numbers = wanted.trim() !== "" && text.trim() !== "" && !Number.isNaN(a) && !Number.isNaN(b);
  const isSame = numbers ? a === b : text.toLowerCase() === wanted.toLowerCase() || (value === null && wanted === "null");
  switch (sign) {
    case "=": return isSame;
    case "!=": return !isSame;
    case "~": return text.toLowerCase().includes(wanted.toLowerCase());
    case ">": return numbers && a > b;
    case "<": return numbers && a < b;
    case ">=": return numbers && a >= b;
    default: return numbers && a <= b;
  }
}

// Returns a function of a run, and what is wrong with the text.
export function parse(text, runs) {
  const tests = [];
  const problems = [];
  for (const [, minus, name, sign, quoted, plain] of text.matchAll(PART)) {
    const wanted = quoted ?? plain ?? "";
    const negated = minus === "-";
    let test;
    if (sign) {
      if (runs.length && !isKnown(runs, name)) problems.push(`no run has ${name}`);
      if (/^[<>]/.test(sign) && Number.isNaN(Number(wanted))) problems.push(`${name}${sign} needs a number`);
      if (name === "state" && sign === "=" && !STATE_ORDER.some((state) => state === wanted.toLowerCase())) {
        problems.push(`states are ${STATE_ORDER.join(", ")}`);
      }
      test = (run) => compares(valueOf(run, name), sign, wanted);
    } else {
      const word = wanted.toLowerCase();
      test = (run) => run.words.includes(word);
    }
    tests.push(negated ? (run) => !test(run) : test);
  }
  return { matches: (run) => tests.every((test) => test(run)), problems };
}

// What words are searched in: the name, the state and the options that are texts.
export function wordsOf(run) {
  const texts = [run.name, run.state, run.reason];
  for (const name in run.options) if (typeof run.options[name] === "string") texts.push(run.options[name]);
  return texts.join("\n").toLowerCase();
}
