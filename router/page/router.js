// Asking the router: its pages, and a streamed answer. The API key, where one is wanted, is kept for this tab alone.

import { keep, kept } from "./kept.js";

const KEY = "baton-api-key";
const PRINTABLE = /^[\x21-\x7e]+$/; // what a header can carry, and keys are made of
const LOOK_MS = 8000;
const KILL_MS = 15000; // longer than a router waits for its launcher

/** The router's answer was an error; `status` 0: there was no answer. */
export class RouterError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Show this key from now on; whether it can be one. */
export function setKey(key) {
  if (!PRINTABLE.test(key)) return false;
  keep("sessionStorage", KEY, key);
  return true;
}

function headers(more = {}) {
  const key = kept("sessionStorage", KEY);
  return key && PRINTABLE.test(key) ? { Authorization: `Bearer ${key}`, ...more } : more;
}

async function answered(path, options) {
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RouterError(0, `The router does not answer${error.name === "TimeoutError" ? " in time" : ""}.`);
  }
  if (answer.ok) return answer;
  let message = `The router answered ${answer.status}.`;
  try {
    message = said((await answer.json()).error) || message;
  } catch {
    // an error without a sentence of its own
  }
  const wait = answer.headers.get("Retry-After");
  throw new RouterError(answer.status, wait ? `${message} Try again in ${wait} s.` : message);
}

/** What an error of OpenAI's shape says, or of none. */
function said(error) {
  return typeof error === "string" ? error : error.message;
}

async function readAsJson(path, options) {
  const answer = await answered(path, options);
  try {
    return await answer.json();
  } catch (error) {
    const why = error.name === "SyntaxError" ? "What answers is no router: it sends no JSON." : "The connection to the router broke.";
    throw new RouterError(0, why);
  }
}

/** A page of the router, read as JSON. */
export async function page(path) {
  return readAsJson(path, { headers: headers(), signal: AbortSignal.timeout(LOOK_MS) });
}

/** Have a node killed. */
export async function kill(node) {
  const more = { method: "POST", body: JSON.stringify({ node }), signal: AbortSignal.timeout(KILL_MS) };
  return readAsJson("/dashboard/kill", { headers: headers({ "Content-Type": "application/json" }), ...more });
}

/** Stream a chat answer; `onChunk` gets each chunk. Ends with [DONE]; an error of the stream is raised. */
export async function chat(body, requestId, signal, onChunk) {
  const more = { "Content-Type": "application/json", "X-Request-Id": requestId };
  const options = { method: "POST", headers: headers(more), body: JSON.stringify({ ...body, stream: true }), signal };
  const answer = await answered("/v1/chat/completions", options);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new RouterError(0, "The connection to the router broke.");
    });
    if (done) throw new RouterError(0, "The answer ended early: the connection to the router broke.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      onChunk(chunkOf(data));
    }
  }
}

function chunkOf(data) {
  let chunk = null;
  try {
    chunk = JSON.parse(data);
  } catch {
    // said below
  }
  if (chunk?.error) throw new RouterError(500, said(chunk.error));
  if (!Array.isArray(chunk?.choices)) throw new RouterError(0, "The answer ended early: what came is no part of one.");
  return chunk;
}
