// The nodes: how each is, its KV blocks by state, and on `baton up` the button that kills it.

import { byId, count, el, setText } from "./dom.js";

const STATES = ["used", "leased", "quarantined", "cached", "free"];
const IDLE = { session: "lost", running: 0, waiting: 0, prefilling: 0, blocks: { used: 0, leased: 0, quarantined: 0, cached: 0, free: 0 } };
const ROLES = ["prefill", "mixed", "decode"];
const BACK_S = 30; // behind it a killed node whose successor nobody has seen can be asked for again

export class Nodes {
  /** `onKill` gets the name of a node. */
  constructor(onKill) {
    this.onKill = onKill;
    this.cards = new Map();
    this.killed = new Map(); // name -> {id, at}: incarnation that is to go, since when
    this.now = 0; // seconds, at the look that is shown
    const keys = STATES.map((state) => el("li", {}, el("i", { class: `swatch block-${state}` }), state));
    byId("block-key").append(...keys);
  }

  /** Show them; `canKill`: there is a launcher that starts new ones. */
  show(nodes, canKill, now = seconds()) {
    this.now = now;
    const shown = nodes.filter((node) => !this.#hasSuccessor(node, nodes)).concat(this.#awaited(nodes));
    const ordered = shown.sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name, "en", { numeric: true }));
    const list = byId("nodes");
    const seen = new Set();
    for (const [index, node] of ordered.entries()) {
      const id = `${node.name}@${node.incarnation}`;
      seen.add(id);
      const known = this.cards.get(id);
      const card = known || this.#card(node, id);
      this.#fill(card, node, canKill);
      if (list.children[index] !== card.root) list.insertBefore(card.root, list.children[index] || null);
    }
    for (const [id, card] of this.cards) {
      if (!seen.has(id)) {
        card.root.remove();
        this.cards.delete(id);
        if (this.killed.get(card.node.name)?.id === id) this.killed.delete(card.node.name);
      }
    }
    byId("no-nodes").hidden = shown.length > 0;
    byId("block-key").hidden = shown.length === 0;
  }

  /** A node is asked to die: its button waits until another process has its name, or none has come. Returns what undoes this. */
  waitFor(name, now = seconds()) {
    const before = this.killed.get(name);
    const ids = [...this.cards].filter(([, card]) => card.node.name === name).map(([id]) => id);
    if (!ids.length) return () => {};
    const mark = { id: ids.at(-1), at: now };
    this.killed.set(name, mark);
    return () => {
      if (this.killed.get(name) !== mark) return;
      if (before) this.killed.set(name, before);
      else this.killed.delete(name);
    };
  }

  /** Whether it was killed, and its successor may still come. */
  awaits(name, now = seconds()) {
    const mark = this.killed.get(name);
    return mark !== undefined && now - mark.at < BACK_S;
  }

  /** Of the killed ones those whose successors have not said hello: their cards keep their places. */
  #awaited(nodes) {
    const names = new Set(nodes.map((node) => node.name));
    return [...this.killed.keys()].filter((name) => !names.has(name)).map((name) => ({ ...this.cards.get(this.killed.get(name).id).node, ...IDLE }));
  }

  #hasSuccessor(node, nodes) {
    return this.#isKilled(node) && nodes.some((each) => each.name === node.name && each.incarnation !== node.incarnation);
  }

  #isKilled(node) {
    return this.killed.get(node.name)?.id === `${node.name}@${node.incarnation}`;
  }

  #card(node, id) {
    const card = {
      state: el("span", { class: "pill" }),
      load: el("span", { class: "node-load" }),
      bar: el("div", { class: "blocks", role: "img" }, ...STATES.map((state) => el("i", { class: `block-${state}` }))),
      numbers: el("p", { class: "node-blocks" }),
      kill: el("button", { type: "button", class: "kill", click: () => this.onKill(node.name) }, "Kill"),
    };
    const name = el("h3", { class: "node-name" }, node.name);
    card.kill.setAttribute("aria-label", `Kill ${node.name} with SIGKILL; a new one is started`);
    const head = el("div", { class: "node-head" }, name, card.state, card.kill);
    card.root = el("li", { class: "node" }, head, card.load, card.bar, card.numbers);
    this.cards.set(id, card);
    return card;
  }

  #fill(card, node, canKill) {
    card.node = node;
    const { text, tone } = health(node);
    const waits = this.#isKilled(node) && this.awaits(node.name, this.now);
    const stayedAway = this.#isKilled(node) && !waits && node.session !== "up";
    setText(card.state, waits ? "killed" : stayedAway ? "did not come back" : text);
    card.state.className = `pill ${waits || stayedAway ? "bad" : tone}`;
    card.kill.hidden = !canKill;
    card.kill.disabled = waits || (node.session !== "up" && !stayedAway);
    const load = [node.role, `${node.running} running`];
    if (node.waiting) load.push(`${node.waiting} waiting`);
    if (node.prefilling) load.push(`${node.prefilling} in prefill`);
    if (node.tp > 1) load.push(`${node.tp} ranks`);
    setText(card.load, load.join(" · "));
    const all = STATES.reduce((sum, state) => sum + node.blocks[state], 0);
    STATES.forEach((state, index) => {
      card.bar.children[index].style.width = all ? `${(100 * node.blocks[state]) / all}%` : "0";
    });
    const told = STATES.filter((state) => node.blocks[state] || state === "used").map((state) => `${count(node.blocks[state])} ${state}`);
    const shown = told.length > 3 ? told.slice(0, -1) : told; // one line: what is free the bar shows
    const none = waits ? "a new one is started" : stayedAway ? "no new one so far; Kill starts one" : `${count(node.num_blocks)} blocks, none told yet`;
    setText(card.numbers, all ? shown.join(" · ") : none);
    card.numbers.title = told.join(" · ");
    card.bar.setAttribute("aria-label", `KV blocks: ${told.join(", ")}`);
    card.root.classList.toggle("gone", waits || node.session === "lost");
  }
}

function seconds() {
  return performance.now() / 1000;
}

function rank(node) {
  return ROLES.indexOf(node.role);
}

/** How a node is, in a word or two. */
export function health(node) {
  if (node.left_out) return { text: "left out (tokenizer)", tone: "bad" }; // it is never dialed
  if (node.session !== "up") return { text: node.session, tone: node.session === "dialing" ? "warn" : "bad" };
  if (node.draining) return { text: "draining", tone: "warn" };
  if (node.circuit !== "closed") return { text: `circuit ${node.circuit}`, tone: "warn" };
  return { text: "up", tone: "good" };
}
