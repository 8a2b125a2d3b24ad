// Asking the router: its pages, and a streamed answer. The API key, where one is wanted, is kept for this tab alone.

const KEY = "baton-api-key";

/** The router's answer was an error; `status` 0: there was no answer. */
export class RouterError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}`, ...more } : more;
}

async function answered(path, options) {
  let answer;
  try {
    answer = await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RouterError(0, "The router does not answer.");
  }
  if (answer.ok) return answer;
  let message = `The router answered ${answer.status}.`;
  try {
    message = (await answer.json()).error.message || message;
  } catch {
    // an error without a sentence of its own
  }
  const wait = answer.headers.get("Retry-After");
  throw new RouterError(answer.status, wait ? `${message} Try again in ${wait} s.` : message);
}

/** A page of the router, read as JSON. */
export async function page(path) {
  const answer = await answered(path, { headers: headers(), signal: AbortSignal.timeout(8000) }).catch((error) => {
    throw error instanceof RouterError ? error : new RouterError(0, "The router does not answer in time.");
  });
  return answer.json();
}

/** Have a node killed. */
export async function kill(node) {
  const options = { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify({ node }) };
  return (await answered("/dashboard/kill", options)).json();
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
      const chunk = JSON.parse(data);
      if (chunk.error) throw new RouterError(500, chunk.error.message);
      onChunk(chunk);
    }
  }
}
