// What the browser keeps for this page; where it keeps nothing (site data is blocked) the page does, for as long as it is open.

const here = new Map(); // what was written while the page is open

/** What is known under a name, or null. `storage`: localStorage or sessionStorage. */
export function kept(storage, name) {
  if (here.has(name)) return here.get(name);
  try {
    return window[storage].getItem(name);
  } catch {
    return null;
  }
}

/** Keep a text under a name; null: forget it. */
export function keep(storage, name, text) {
  here.set(name, text);
  try {
    if (text === null) window[storage].removeItem(name);
    else window[storage].setItem(name, text);
  } catch {
    // it is known here
  }
}
