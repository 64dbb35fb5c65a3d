// Requests. The token is in the address once; it is kept for this origin, and sent as a header with what changes something.

const KEY = "modelyard-token";
const given = new URLSearchParams(location.search).get("token");
if (given) {
  localStorage.setItem(KEY, given);
  history.replaceState(null, "", location.pathname + location.hash);
}

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function answer(path, settings) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", cache: "no-store", ...settings });
  } catch {
    throw new ServerError("The dashboard does not answer. Is it still running?", 0);
  }
  let value = {};
  try {
    value = await response.json();
  } catch {
    // The status says enough.
  }
  if (!response.ok) throw new ServerError(value.error || `The dashboard answered ${response.status}.`, response.status);
  return value;
}

export const get = (path) => answer(path, { method: "GET" });

export function post(path, body = {}) {
  const headers = { "Content-Type": "application/json", "X-Modelyard-Token": localStorage.getItem(KEY) || "" };
  return answer(path, { method: "POST", headers, body: JSON.stringify(body) });
}
