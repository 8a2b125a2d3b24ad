// Whose answers these are: behind a balancer several routers may answer in turn, each of which knows its own requests alone.

export const IN_TURN = "Several routers answer here in turn, and each knows its own requests alone; open one's own address.";

/** The workers whose numbers are in a look, each by its process's own name, which none that is started again has. */
export function names(look) {
  return look.state.workers.map((each) => each.router).sort();
}

export class Routers {
  constructor() {
    this.areSeveral = false; // until the page is loaded anew
    this.known = new Set();
    this.before = [];
  }

  /** One that comes again behind a look in which all were others has not been started anew, as one that never comes again has. */
  heard(look) {
    if (look.state.workers.length < look.num_workers) return; // one router's workers may be late in turn, too
    const now = names(look);
    const areOthers = !now.some((each) => this.before.includes(each));
    this.areSeveral ||= areOthers && now.some((each) => this.known.has(each));
    now.forEach((each) => this.known.add(each));
    this.before = now;
  }
}
