// A request's timeline as a picture: lanes, bars and marks as the router has laid them out (router/timeline_picture.py).

import { byId, duration, el, setText, svg } from "./dom.js";

const LANE = 26;
const BAR = 14;
const TOP = 18; // for the marks' texts
const AXIS = 20;
const NAMES = {
  route: "route",
  queue: "queue",
  retry: "wait",
  prefill: "prefill",
  reserve_wait: "wait for lease",
  transfer: "transfer",
  admit: "admit",
  first_step: "first step",
  decode: "decode",
  move: "move",
  lost: "lost",
  return: "return",
};
const TITLES = {
  beginning: "To the second token",
  retry: "The retry: from the failure until tokens come again",
  whole: "The whole request",
};

export class Picture {
  constructor() {
    this.shown = null;
    this.widths = 0;
    new ResizeObserver(() => this.#resized()).observe(byId("picture"));
  }

  /** Show this; null: nothing is chosen. */
  show(found) {
    this.shown = found;
    byId("no-timeline").hidden = found !== null;
    byId("timeline").hidden = found === null;
    if (found === null) return;
    const { timeline, picture } = found;
    setText(byId("timeline-of"), title(timeline));
    this.#draw(picture);
    parts(timeline, picture.choice);
    attempts(timeline, picture.choice);
  }

  #resized() {
    const width = byId("picture").clientWidth;
    if (this.shown !== null && width !== this.width) this.#draw(this.shown.picture);
  }

  #draw(picture) {
    const place = byId("picture");
    this.width = place.clientWidth;
    place.replaceChildren(...picture.panels.map((panel) => drawn(panel, Math.max(this.width, 280))));
  }
}

function title(timeline) {
  const state = timeline.outcome === null ? "live" : timeline.outcome;
  const attempts = timeline.num_attempts === 1 ? "1 attempt" : `${timeline.num_attempts} attempts`;
  return `${timeline.id.slice(0, 8)} · ${state} · ${duration(timeline.seconds)} · ${attempts}`;
}

function drawn(panel, width) {
  const height = TOP + panel.lanes.length * LANE + AXIS;
  const left = Math.min(Math.max(...panel.lanes.map((lane) => lane.length)) * 7 + 10, width / 3);
  const right = 8;
  const length = Math.max(panel.end - panel.start, 1e-6);
  const x = (at) => left + ((at - panel.start) / length) * (width - left - right);
  const y = (lane) => TOP + panel.lanes.indexOf(lane) * LANE;
  const picture = svg("svg", { class: "panel", width, height, role: "img", "aria-label": told(panel) });
  for (const lane of panel.lanes) {
    const middle = y(lane) + LANE / 2;
    picture.append(
      svg("line", { class: "lane", x1: left, x2: width - right, y1: middle, y2: middle }),
      svg("text", { class: "lane-name", x: left - 8, y: middle + 4, "text-anchor": "end" }, short(lane, left)),
    );
  }
  axis(picture, panel, x, width, height);
  for (const bar of panel.bars) picture.append(...drawnBar(bar, x, y(bar.lane)));
  drawnMarks(picture, panel, x, y, width);
  const heading = el("h4", {}, TITLES[panel.kind]);
  return el("figure", {}, heading, picture);
}

function short(lane, left) {
  const room = Math.floor((left - 10) / 7);
  return lane.length <= room ? lane : `${lane.slice(0, Math.max(room - 1, 1))}…`;
}

function drawnBar(bar, x, top) {
  const from = x(bar.start);
  const wide = Math.max(x(bar.end) - from, 1.5);
  const name = NAMES[bar.kind] || bar.kind;
  const which = bar.attempt === null ? "" : `, attempt ${bar.attempt}`;
  const about = bar.estimated ? " (where exactly is estimated)" : "";
  const chunks = bar.cuts.length ? ` in ${bar.cuts.length + 1} chunks` : "";
  const hint = svg("title", {}, `${name}${which}: ${duration(bar.end - bar.start)}${chunks}${about}`);
  const y = top + (LANE - BAR) / 2;
  const made = [svg("rect", { class: `bar bar-${bar.kind}`, x: from, y, width: wide, height: BAR, rx: 2 }, hint)];
  for (const cut of bar.cuts) {
    const at = x(cut);
    made.push(svg("line", { class: "cut", x1: at, x2: at, y1: y + 1, y2: y + BAR - 1 }));
  }
  if (wide > name.length * 6.2 + 8) {
    made.push(svg("text", { class: `bar-name bar-name-${bar.kind}`, x: from + 5, y: y + BAR - 3.5 }, name));
  }
  return made;
}

function drawnMarks(picture, panel, x, y, width) {
  let free = -Infinity;
  for (const mark of panel.marks) {
    const at = x(mark.at);
    const bottom = mark.lane === null ? TOP + panel.lanes.length * LANE : y(mark.lane) + LANE;
    picture.append(svg("line", { class: `mark mark-${mark.kind}`, x1: at, x2: at, y1: TOP - 2, y2: bottom }, svg("title", {}, mark.text)));
    const room = mark.text.length * 6.2;
    const begin = Math.max(Math.min(at, width - room - 4), 0);
    if (begin < free) continue; // its hint has it
    free = begin + room + 10;
    picture.append(svg("text", { class: `mark-text mark-text-${mark.kind}`, x: begin, y: TOP - 6 }, mark.text));
    if (mark.kind === "failed" && mark.lane !== null) picture.append(cross(at, y(mark.lane) + LANE / 2));
  }
}

function cross(x, y) {
  return svg("path", { class: "cross", d: `M${x - 4} ${y - 4}l8 8m0-8l-8 8` });
}

function axis(picture, panel, x, width, height) {
  const length = panel.end - panel.start;
  const rough = length / 4 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) || rough;
  for (let at = Math.ceil(panel.start / step) * step; at <= panel.end + step * 1e-6; at += step) {
    const where = x(at);
    const label = at === 0 ? "0" : duration(at);
    const middle = Math.min(where, width - label.length * 3.3); // its text stays inside
    picture.append(
      svg("line", { class: "tick", x1: where, x2: where, y1: TOP, y2: height - AXIS }),
      svg("text", { class: "tick-text", x: middle, y: height - 6, "text-anchor": "middle" }, label),
    );
  }
}

/** The same in words, for who does not see it. */
function told(panel) {
  const bars = panel.bars.map((bar) => `${bar.lane}: ${NAMES[bar.kind] || bar.kind} ${duration(bar.end - bar.start)}`);
  const marks = panel.marks.map((mark) => `${mark.text} at ${duration(mark.at)}`);
  return `${TITLES[panel.kind]}. ${[...bars, ...marks].slice(0, 40).join("; ")}.`;
}

function parts(timeline, index) {
  const choice = timeline.choices.find((each) => each.index === index) || timeline.choices[0];
  const rows = [];
  for (const [name, leg] of [["time to first token", choice.time_to_first_token], ["first to second token", choice.first_to_second_token]]) {
    if (leg === null) continue;
    rows.push(el("tr", { class: "sum" }, el("th", { scope: "row" }, name), el("td", { class: "number" }, duration(leg.seconds))));
    for (const [part, seconds] of Object.entries(leg.parts)) {
      if (seconds > 0) rows.push(el("tr", {}, el("th", { scope: "row" }, NAMES[part] || part), el("td", { class: "number" }, duration(seconds))));
    }
  }
  byId("parts").replaceChildren(...rows);
  byId("parts-table").hidden = rows.length === 0;
}

function attempts(timeline, index) {
  const choice = timeline.choices.find((each) => each.index === index) || timeline.choices[0];
  const rows = choice.attempts.map((each) => {
    const nodes = each.sender === each.receiver ? each.receiver : `${each.sender} → ${each.receiver}`;
    const until = each.ended_at === null ? timeline.seconds : each.ended_at;
    return el(
      "tr",
      {},
      el("td", { class: "number" }, each.attempt),
      el("td", {}, each.kind),
      el("td", {}, nodes),
      el("td", { class: "number" }, duration(until - each.at)),
      el("td", { class: each.end === null || ["stop", "length", "tool_calls", "moved", "move_off"].includes(each.end) ? "" : "bad-text" }, each.end || "live"),
    );
  });
  byId("attempts").replaceChildren(...rows);
}
