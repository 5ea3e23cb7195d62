// Requests to the server. The API key lives in this tab's sessionStorage and in the request header.

const KEY = "kvkeep-key";
const PATIENCE_MS = 20000;

// An error response: its status and message.
export class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

let kept = null;  // without storage the key lasts as long as the page
export const key = () => {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return kept;
  }
};
export const setKey = (value) => {
  kept = value || null;
  try {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // see above
  }
};

const words = async (answer) => {
  try {
    const {error} = await answer.json();
    return [String(error.message), error.code];
  } catch {
    return [`the server answered ${answer.status}`, null];
  }
};

// Return the JSON at `path`; `body`, if given, is posted. Throws Refused for an error response, and
// TypeError or a DOMException without a response.
export const ask = async (path, {query = {}, body} = {}) => {
  const url = new URL(path, document.baseURI);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined) url.searchParams.set(name, value);
  }
  const headers = {accept: "application/json"};
  if (key()) headers.authorization = `Bearer ${key()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(url, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
    signal: AbortSignal.timeout(PATIENCE_MS),
  });
  if (!answer.ok) throw new Refused(answer.status, ...await words(answer));
  return answer.json();
};
