// The dashboard: asks the router once a second while somebody looks, and hands what it says to the parts of the page.

import { Chat } from "./chat.js";
import { byId, el, setText } from "./dom.js";
import { Figures } from "./figures.js";
import { keep } from "./kept.js";
import { Nodes } from "./nodes.js";
import { Picture } from "./picture.js";
import { Requests } from "./requests.js";
import { RouterError, kill, page, setKey } from "./router.js";
import { IN_TURN, Routers } from "./routers.js";

const LOOK_MS = 1000;
const REFUSED_MS = 30000; // for so long it is read why a node was not killed
const THEMES = ["auto", "light", "dark"];

const figures = new Figures();
const nodes = new Nodes(killNode);
const requests = new Requests(select);
const routers = new Routers();
const picture = new Picture();
const chat = new Chat({ started: select, looked: lookedAtChat, ended: look, refused: problem, kill: killNode });
let selected = null; // id of the request whose timeline is shown
let isShownWhole = false; // it has ended, and that is drawn
let isGone = false; // the router that was asked has nothing of it (any more)
let isLooking = false;
let hiding = 0; // timer, of why a node was not killed
const killing = new Set(); // names of nodes that are asked for
let badKey = ""; // why what was written is no key

async function look() {
  if (document.hidden || isLooking) return;
  isLooking = true;
  try {
    const now = await page("/dashboard/state");
    routers.heard(now);
    well(now);
    figures.show(now);
    nodes.show(now.state.nodes, now.can_kill);
    requests.show(now.requests, selected);
    chat.model = now.model;
    chat.canKill = now.can_kill;
    byId("send-kill").hidden = !now.can_kill;
    const isOver = isShownWhole || (isGone && !routers.areSeveral);
    if (selected !== null && !isOver && selected !== chat.requestId) await lookAtSelected();
  } catch (error) {
    problem(error instanceof RouterError ? error : new RouterError(0, "What the router answers is nothing that this page knows."));
    if (!(error instanceof RouterError)) throw error;
  } finally {
    isLooking = false;
  }
}

async function lookAtSelected() {
  const asked = selected;
  try {
    const found = await page(`/dashboard/requests/${encodeURIComponent(asked)}`);
    if (asked === selected) shown(found);
  } catch (error) {
    if (!(error instanceof RouterError) || ![404, 503].includes(error.status)) throw error;
    if (asked !== selected || error.status === 503) return; // who has it has not answered, perhaps
    isGone = true; // it is not kept any more: what is drawn stays
  }
}

function shown(found) {
  isShownWhole = found.timeline.outcome !== null;
  picture.show(found);
}

function lookedAtChat(found) {
  if (selected === found.timeline.client_request_id || selected === found.timeline.id) shown(found);
}

function select(id) {
  selected = id;
  isShownWhole = false;
  isGone = false;
  look();
}

async function killNode(name) {
  if (killing.has(name) || nodes.awaits(name)) return; // pressed twice
  killing.add(name);
  const undo = nodes.waitFor(name);
  refused("");
  setText(byId("said"), `${name} is killed; a new one is started.`);
  try {
    await kill(name);
  } catch (error) {
    undo();
    setText(byId("said"), "");
    if (!(error instanceof RouterError)) throw error;
    refused(`Kill ${name}: ${error.message}`);
  } finally {
    killing.delete(name);
  }
  look();
}

function refused(text) {
  clearTimeout(hiding);
  byId("refused").hidden = !text;
  setText(byId("refused"), text);
  if (text) hiding = setTimeout(refused, REFUSED_MS, "");
}

function well(now) {
  const lacking = [...now.state.missing, ...now.state.degraded];
  setText(byId("model"), `${now.model}${workers(now)}`);
  setText(byId("status"), now.state.ready ? (lacking.length ? "degraded" : "ready") : "not ready");
  byId("status").className = `pill ${now.state.ready ? (lacking.length ? "warn" : "good") : "bad"}`;
  const lacks = lacking.length ? `${now.state.ready ? "Served without" : "Requests wait or are turned away"}: ${lacking.join("; ")}.` : "";
  notice([lacks, routers.areSeveral ? IN_TURN : ""].filter(Boolean).join(" "));
  byId("main").classList.remove("stale");
  byId("keys").hidden = true;
}

/** How many there are, and whose numbers are missing, if some are. */
function workers(now) {
  const answered = now.state.workers.length;
  if (now.num_workers === 1) return "";
  return answered === now.num_workers ? `, ${answered} workers` : `, ${answered} of ${now.num_workers} workers have answered`;
}

function problem(error) {
  setText(byId("status"), error.status === 401 ? "key wanted" : "no answer");
  byId("status").className = "pill bad";
  byId("main").classList.add("stale");
  const asksForKey = error.status === 401;
  if (asksForKey && byId("keys").hidden) {
    byId("keys").hidden = false;
    byId("key").focus();
  }
  notice(asksForKey ? "" : `${error.message} What is shown is old; it is asked again each second.`);
  setText(byId("key-problem"), asksForKey ? badKey || error.message : "");
}

function notice(text) {
  byId("notice").hidden = !text;
  setText(byId("notice"), text);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  keep("localStorage", THEME_KEY, theme); // theme.js reads it, and has named it
  for (const button of byId("theme").children) button.setAttribute("aria-pressed", String(button.dataset.theme === theme));
}

for (const theme of THEMES) {
  byId("theme").append(el("button", { type: "button", "data-theme": theme, click: () => setTheme(theme) }, theme));
}
const chosen = document.documentElement.dataset.theme;
setTheme(THEMES.includes(chosen) ? chosen : "auto");
byId("keys").addEventListener("submit", (event) => {
  event.preventDefault();
  badKey = setKey(byId("key").value.trim()) ? "" : "A key is of printable ASCII characters alone.";
  byId("key").value = "";
  look();
});
setText(byId("curl"), `curl ${location.origin}/v1/models`);
document.addEventListener("visibilitychange", look);
setInterval(look, LOOK_MS);
look();
