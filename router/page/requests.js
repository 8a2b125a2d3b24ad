// The newest requests; one of them is shown in detail.

import { byId, duration, el, setText } from "./dom.js";

const CANARY = "canary"; // of `baton doctor` (router/canary.py)

export class Requests {
  /** `onSelect` gets the id of a request. */
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.rows = new Map();
  }

  show(requests, selected) {
    const body = byId("requests");
    const seen = new Set();
    requests.forEach((each, index) => {
      seen.add(each.id);
      const row = this.rows.get(each.id) || this.#row(each);
      fill(row, each, selected === each.id || (selected !== null && selected === each.client_request_id));
      if (body.children[index] !== row.root) body.insertBefore(row.root, body.children[index] || null);
    });
    for (const [id, row] of this.rows) {
      if (!seen.has(id)) {
        row.root.remove();
        this.rows.delete(id);
      }
    }
    byId("no-requests").hidden = requests.length > 0;
    byId("requests-table").hidden = requests.length === 0;
  }

  #row(request) {
    const cell = (name) => el("td", { class: name });
    const row = {
      button: el("button", { type: "button", class: "link", click: () => this.onSelect(request.id) }, request.id.slice(0, 8)),
      outcome: el("span", { class: "pill" }),
      tokens: cell("number"),
      first: cell("number"),
      seconds: cell("number"),
      attempts: cell("number wide"),
      nodes: cell("nodes-of wide"),
    };
    const name = nameOf(request);
    const shown = name && el("span", { class: `request-name ${name === CANARY ? "" : "wide"}`, title: request.client_request_id }, name);
    row.root = el("tr", {}, el("td", {}, row.button, shown), el("td", {}, row.outcome), row.tokens, row.first, row.seconds, row.attempts, row.nodes);
    this.rows.set(request.id, row);
    return row;
  }
}

/** Whose it is, as far as its client's own name for it tells. */
function nameOf(request) {
  const name = request.client_request_id || "";
  if (name === "canary") return CANARY;
  return name.startsWith("dashboard-") ? "chat" : name;
}

function fill(row, request, isSelected) {
  setText(row.outcome, request.outcome === null ? "live" : request.outcome);
  row.outcome.className = `pill ${request.outcome === null ? "live" : request.ended_well ? "plain" : "bad"}`;
  const completion = request.completion_tokens === null ? "–" : request.completion_tokens;
  setText(row.tokens, `${request.prompt_tokens} → ${completion}`);
  setText(row.first, duration(request.first_token_s));
  setText(row.seconds, duration(request.seconds));
  setText(row.attempts, String(request.num_attempts));
  row.attempts.classList.toggle("retried", request.num_attempts > request.num_choices);
  setText(row.nodes, request.nodes.join(", "));
  row.root.classList.toggle("selected", isSelected);
  row.button.setAttribute("aria-pressed", String(isSelected));
  const retried = request.num_attempts > request.num_choices ? `, ${request.num_attempts} attempts` : "";
  row.button.setAttribute("aria-label", `Show the timeline of request ${request.id.slice(0, 8)}${retried}`);
}
