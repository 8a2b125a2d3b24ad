// The four figures: what they are now, and a line of up to the last two minutes.

import { byId, count, duration, el, setText, svg } from "./dom.js";
import { names } from "./routers.js";

const KEPT = 120; // points, of looks that are about a second apart
const APART_S = 0.9; // at least: who presses a row looks in between, and hundredths of a second make no rate
const GAP_S = 3; // behind a longer one (the page was hidden, say) a line begins anew
const FEWEST = 30; // that the line has room for: a page that was just opened is not all blank
const WIDTH = 160;
const HEIGHT = 32;
const BASE = HEIGHT - 1; // where 0 is

const FIGURES = [
  { id: "live", title: "In flight", unit: "requests" },
  { id: "rate", title: "Throughput", unit: "tokens/s" },
  { id: "first", title: "Time to first token", unit: "median" },
  { id: "token", title: "Time per token", unit: "median" },
];

/** Tokens per second between two looks; null where they cannot be compared: others have answered, or one that was started anew. */
export function rate(before, now) {
  if (!before || now.at <= before.at || now.generated_tokens < before.generated_tokens || String(names(before)) !== String(names(now))) return null;
  return (now.generated_tokens - before.generated_tokens) / (now.at - before.at);
}

export class Figures {
  constructor() {
    this.before = null;
    this.tiles = new Map();
    for (const each of FIGURES) {
      const tile = {
        history: [],
        value: el("span", { class: "figure-value" }, "–"),
        more: el("span", { class: "figure-more" }, " "),
        line: svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }),
        ...each,
      };
      this.tiles.set(each.id, tile);
      const head = el("h3", {}, each.title);
      const number = el("p", {}, tile.value, " ", el("span", { class: "unit" }, each.unit));
      byId("figures").append(el("div", { class: "figure" }, head, number, tile.more, tile.line));
    }
  }

  /** Show a look at the router: the numbers as they are, and a point of each line where the last one is far enough away. */
  show(now) {
    const first = now.first_token_s;
    const token = now.token_s;
    const queued = now.state.queued;
    this.#tell("live", String(now.state.live_requests), queued ? `${queued} queued` : "none queued");
    this.#tell("first", duration(first && first.p50), spread(first));
    this.#tell("token", duration(token && token.p50), spread(token));
    const passed_s = this.before ? now.at - this.before.at : APART_S;
    if (0 <= passed_s && passed_s < APART_S) return;
    const isGap = passed_s < 0 || passed_s > GAP_S;
    const tokens = isGap ? null : rate(this.before, now);
    this.before = now;
    this.#tell("rate", perSecond(tokens), `${count(now.generated_tokens)} since the start`);
    const points = { live: now.state.live_requests, rate: tokens, first: first && first.p50, token: token && token.p50 };
    for (const [id, number] of Object.entries(points)) this.#draw(this.tiles.get(id), isGap ? [null, number] : [number]);
  }

  #tell(id, shown, more) {
    const tile = this.tiles.get(id);
    setText(tile.value, shown);
    setText(tile.more, more);
  }

  #draw(tile, points) {
    tile.history = [...tile.history, ...points].slice(-KEPT);
    draw(tile);
  }
}

function perSecond(tokens) {
  if (tokens === null) return "–";
  return tokens === 0 ? "0" : tokens < 9.95 ? tokens.toFixed(1) : count(Math.round(tokens));
}

function spread(times) {
  return times ? `p95 ${duration(times.p95)} of ${times.num === 1 ? "1 request" : `${count(times.num)} requests`}` : "none in the last minute";
}

function draw(tile) {
  const known = tile.history.filter((each) => each !== null);
  const most = Math.max(...known, 1e-9);
  const room = Math.max(tile.history.length, FEWEST);
  const step = WIDTH / (room - 1);
  const first = room - tile.history.length;
  const stretches = [[]]; // of looks with a number
  tile.history.forEach((each, index) => {
    if (each === null) stretches.push([]);
    else stretches.at(-1).push([(first + index) * step, BASE - (each / most) * (BASE - 2)].map((at) => at.toFixed(1)).join(" "));
  });
  const drawn = stretches.filter((each) => each.length);
  const line = drawn.map((each) => `M${each.join("L")}`).join("");
  const area = drawn.map((each) => `M${foot(each[0])}L${each.join("L")}L${foot(each.at(-1))}Z`).join("");
  tile.line.replaceChildren(
    svg("line", { class: "spark-base", x1: 0, x2: WIDTH, y1: BASE, y2: BASE }),
    svg("path", { class: "spark-area", d: area }),
    svg("path", { class: "spark-line", d: line }),
  );
  tile.line.setAttribute("aria-label", known.length ? `${tile.title}, the last ${tile.history.length} looks` : `${tile.title}: nothing yet`);
}

/** The point below another one, on the base. */
function foot(point) {
  return `${point.split(" ")[0]} ${BASE}`;
}
