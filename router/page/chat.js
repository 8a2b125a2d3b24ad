// The chat: an answer as it arrives, and where in it another node took over.

import { byId, duration, el, setText } from "./dom.js";
import { RouterError, chat, page } from "./router.js";

const LOOK_MS = 400; // at the timeline of the answer that arrives
const LAST_LOOKS = 10; // at one that is stopped, and whose outcome is not there yet
// For the button beside Send, where nothing is written.
const FALLBACK = "Tell me a story about a fox.";
const KILLED_AFTER = 8; // chunks: the answer is well under way
const RESUMED = ["failed", "moved"];

export class Chat {
  /** `on`: `started(requestId)`, `looked(found)`, `ended()`, `refused(error)`, `kill(node)`. */
  constructor(on) {
    this.on = on;
    this.model = null;
    this.canKill = false;
    this.turns = []; // messages of the conversation that got an answer
    this.abort = null;
    this.requestId = null; // of the answer that arrives, which it looks at itself
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.abort) this.abort.abort();
      else this.send(byId("prompt").value);
    });
    byId("send-kill").addEventListener("click", () => this.send(byId("prompt").value || FALLBACK, true));
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.abort) this.send(byId("prompt").value);
    });
    byId("clear").addEventListener("click", () => this.clear());
    for (const button of document.querySelectorAll(".suggestion")) {
      button.addEventListener("click", () => this.send(button.textContent));
    }
  }

  clear() {
    if (this.abort) this.abort.abort();
    this.turns = [];
    byId("log").replaceChildren();
    byId("no-chat").hidden = false;
  }

  /** `kills`: the node that generates the answer, as soon as there is some of it; a small model is too fast for a hand. */
  async send(text, kills = false) {
    const prompt = text.trim();
    if (!prompt || this.model === null || this.abort) return;
    byId("prompt").value = "";
    byId("no-chat").hidden = true;
    const answer = new Answer(prompt, this.on.kill);
    const requestId = (this.requestId = `dashboard-${randomName()}`);
    this.abort = new AbortController();
    this.#busy(true);
    const looking = this.#look(requestId, answer, this.abort.signal);
    const body = {
      model: this.model,
      messages: [...this.turns, { role: "user", content: prompt }],
      max_tokens: number("max-tokens", 256),
      temperature: number("temperature", 0),
    };
    try {
      this.on.started(requestId);
      await chat(body, requestId, this.abort.signal, (chunk) => {
        if (answer.take(chunk) && kills && answer.pieces.length === KILLED_AFTER) this.#killNow(requestId, answer);
      });
      if (answer.said) this.turns.push({ role: "user", content: prompt }, { role: "assistant", content: answer.said });
    } catch (error) {
      if (error.name === "AbortError") answer.fail("Stopped.");
      else answer.fail(error.message);
      if (error instanceof RouterError && error.status === 401) this.on.refused(error);
    } finally {
      answer.draw(); // who reads that it is done finds all of it
      this.abort.abort();
      this.abort = null;
      this.requestId = null;
      this.#busy(false);
      try {
        await looking;
        await this.#lookOnce(requestId, answer);
      } finally {
        answer.end();
        this.on.ended();
      }
    }
    await this.#lookForItsEnd(requestId, answer);
  }

  /** The router hears a moment later of one that was stopped: what stands below it would stay without an outcome. */
  async #lookForItsEnd(requestId, answer) {
    for (let left = LAST_LOOKS; left > 0 && answer.isLive; left--) {
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
      await this.#lookOnce(requestId, answer);
    }
  }

  async #killNow(requestId, answer) {
    await this.#lookOnce(requestId, answer);
    if (answer.node) this.on.kill(answer.node);
  }

  #busy(isBusy) {
    setText(byId("send"), isBusy ? "Stop" : "Send");
    byId("send-kill").disabled = isBusy;
    byId("chat").setAttribute("aria-busy", String(isBusy));
  }

  /** Until the signal. */
  async #look(requestId, answer, signal) {
    while (!signal.aborted) {
      await new Promise((resolve) => setTimeout(resolve, LOOK_MS));
      if (!signal.aborted) await this.#lookOnce(requestId, answer);
    }
  }

  async #lookOnce(requestId, answer) {
    try {
      const found = await page(`/dashboard/requests/${requestId}`);
      answer.look(found.timeline, this.canKill);
      this.on.looked(found);
    } catch (error) {
      if (!(error instanceof RouterError)) throw error; // not there yet, or the router is gone: the answer itself will say so
    }
  }
}

/** One question and its answer. */
class Answer {
  constructor(prompt, kill) {
    this.text = "";
    this.said = ""; // of the text what is no thought
    this.hasThought = false; // which stands in front
    this.begunAt = performance.now();
    this.pieces = []; // {at: seconds since it was sent, length: of the text by then}
    this.takeovers = 0;
    this.isLive = false; // as far as the router is known to say
    this.isOver = false; // nothing comes any more
    this.body = el("div", { class: "answer-text" });
    this.tail = document.createTextNode("");
    this.cursor = el("span", { class: "cursor", "aria-hidden": "true" });
    this.meta = el("p", { class: "meta" }, "waiting for the first token");
    this.kill = el("button", { type: "button", class: "kill", hidden: true, click: () => kill(this.node) });
    this.drawn = 0; // characters before `tail`
    this.isDrawing = false;
    this.body.append(this.tail, this.cursor);
    const question = el("div", { class: "message question" }, el("h3", { class: "who" }, "You"), el("p", {}, prompt));
    const whole = el("div", { class: "message answer" }, el("h3", { class: "who" }, "Model"), this.body, el("div", { class: "under" }, this.meta, this.kill));
    byId("log").append(question, whole);
    this.#follow();
  }

  /** More of the answer; whether there was text in it. It is drawn once a frame, however fast it comes. */
  take(chunk) {
    const text = this.#told(chunk.choices[0]?.delta || {});
    if (!text) return false;
    this.text += text;
    this.pieces.push({ at: (performance.now() - this.begunAt) / 1000, length: this.text.length });
    if (!this.isDrawing) {
      this.isDrawing = true;
      requestAnimationFrame(() => this.draw());
    }
    return true;
  }

  #told(delta) {
    const thought = delta.reasoning_content || "";
    const said = delta.content || "";
    const beforeThought = thought && !this.hasThought ? "Thinks: " : "";
    this.hasThought ||= Boolean(thought);
    const beforeSaid = said && this.hasThought && !this.said ? "\n\n" : "";
    this.said += said;
    return beforeThought + thought + beforeSaid + said;
  }

  /** What has come, now. */
  draw() {
    this.isDrawing = false;
    const isAtEnd = this.#isAtEnd();
    this.tail.data = this.text.slice(this.drawn);
    if (isAtEnd) this.#follow();
  }

  /** Mark where another node took over, and say who generates. */
  look(timeline, canKill) {
    const changes = timeline.events.filter((event) => RESUMED.includes(event.what));
    for (const event of changes.slice(this.takeovers)) this.#mark(event, timeline);
    this.takeovers = changes.length;
    // A move that is under way, or has come to nothing, is not where the answer is.
    const moved = timeline.events.filter((event) => event.what === "moved").map((event) => event.attempt);
    const attempts = timeline.choices[0].attempts.filter((each) => each.kind !== "move" || moved.includes(each.attempt));
    const last = attempts[attempts.length - 1];
    this.isLive = timeline.outcome === null;
    if (last) this.node = last.receiver;
    else if (this.isLive) return;
    const told = last ? [last.sender === last.receiver ? last.receiver : `${last.sender} → ${last.receiver}`] : [];
    if (timeline.completion_tokens !== null) told.push(`${timeline.completion_tokens} tokens`);
    if (timeline.first_token_s !== null) told.push(`first token ${duration(timeline.first_token_s)}`);
    if (!this.isLive) told.push(duration(timeline.seconds), timeline.outcome);
    setText(this.meta, told.join(" · "));
    setText(this.kill, `Kill ${this.node}`);
    this.kill.hidden = this.isOver || !(canKill && this.isLive && last.end === null);
  }

  fail(message) {
    this.body.append(el("p", { class: "error", role: "alert" }, message));
  }

  end() {
    this.isOver = true;
    this.cursor.remove();
    this.kill.hidden = true;
  }

  #mark(event, timeline) {
    this.draw();
    const before = this.pieces.filter((piece) => piece.at <= event.at);
    const length = Math.max(before.length ? before[before.length - 1].length : 0, this.drawn);
    const behind = this.tail.splitText(length - this.drawn);
    this.drawn = length;
    const next = timeline.choices[0].attempts.find((each) => each.at >= event.at - 1e-6 && each.attempt > event.attempt);
    const lost = event.what === "moved" ? "moved" : `${event.nodes[0] || "a node"} ${event.code === "NODE_LOST" ? "lost" : event.code}`;
    const target = event.what === "moved" ? event.nodes[0] : next ? next.receiver : null;
    const text = target ? `${lost}, goes on at ${target}` : lost;
    this.body.insertBefore(el("mark", { class: "takeover", title: `${duration(event.at)} after it was sent` }, text), behind);
    this.tail = behind;
    this.#follow();
  }

  #isAtEnd() {
    const log = byId("log");
    return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  }

  #follow() {
    byId("log").scrollTop = byId("log").scrollHeight;
  }
}

function number(id, otherwise) {
  const value = byId(id).valueAsNumber;
  return Number.isFinite(value) ? value : otherwise;
}

function randomName() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
