// The connection of every page to the console: hints that something changed, and how old it is.

const root = document.documentElement.dataset.root;
const live = document.getElementById("live");
const problem = document.getElementById("problem");
const caveats = document.getElementById("caveats");
const RETRY_MS = 5000;

let heard = 0;
let ahead = 0; // milliseconds by which this machine's clock is ahead of the console's
let instance = "";

// `reconnect` follows the console again after a refusal; what has changed since `query` comes first
export function connect(query, listeners, reconnect = () => connect(query, listeners)) {
  const params = new URLSearchParams(query);
  const source = new EventSource(`${root}api/changes?${params}`);
  source.addEventListener("state", (message) => {
    const state = JSON.parse(message.data);
    if (instance && instance !== state.instance) {
      location.reload(); // another console process answers: its revisions are others
      return;
    }
    instance = state.instance;
    heard = Date.now();
    ahead = heard - Date.parse(state.at);
    show(state);
  });
  for (const [name, listener] of Object.entries(listeners)) {
    source.addEventListener(name, (message) => {
      heard = Date.now();
      listener(JSON.parse(message.data));
    });
  }
  source.addEventListener("error", () => {
    say("lost", "no connection to the console; trying again");
    document.body.classList.add("is-old");
    if (source.readyState === EventSource.CLOSED) {
      source.close();
      setTimeout(reconnect, RETRY_MS);
    }
  });
  addEventListener("pagehide", () => source.close(), { once: true });
  return source;
}

export function show(state) {
  problem.textContent = state.problem;
  problem.hidden = !state.problem;
  caveats.textContent = state.caveats.join("; ");
  caveats.hidden = state.caveats.length === 0;
  document.body.classList.toggle("is-old", Boolean(state.problem));
  say(state.problem ? "old" : "live", state.problem ? "out of date" : "live");
  const count = document.getElementById("alert-count");
  count.textContent = state.alerts ? String(state.alerts) : "";
}

function say(state, text) {
  live.dataset.state = state;
  if (live.textContent !== text) live.textContent = text;
}

// back from the page cache: the connection was closed
addEventListener("pageshow", (event) => {
  if (event.persisted) location.reload();
});

// a connection that says nothing is no connection: state comes every few seconds
setInterval(() => {
  if (heard && Date.now() - heard > 30000) {
    say("lost", `nothing heard from the console for ${Math.round((Date.now() - heard) / 1000)} s`);
    document.body.classList.add("is-old");
  }
}, 5000);

// Replaces a part of the page with a fresh one from the same address; keeps focus and what is open.
let refreshing = false;
let again = null; // the newest call meanwhile
export async function refresh(selector, address = location.href) {
  if (refreshing) {
    again = [selector, address];
    return;
  }
  refreshing = true;
  try {
    const answer = await fetch(address, { headers: { accept: "text/html" } });
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector(selector);
    const old = document.querySelector(selector);
    if (fresh && old) swap(old, fresh);
  } catch {
    // the banner already says that the console does not answer
  } finally {
    refreshing = false;
    if (again) {
      const newest = again;
      again = null;
      setTimeout(() => refresh(...newest), 500);
    }
  }
}

function swap(old, fresh) {
  const open = new Set([...old.querySelectorAll("details[open][id]")].map((each) => each.id));
  for (const each of fresh.querySelectorAll("details[id]")) each.open = open.has(each.id);
  const scrolled = [...old.querySelectorAll(".scroll[id]")].map((each) => [each.id, each.scrollLeft]);
  const focused = old.contains(document.activeElement) ? document.activeElement : null;
  const place = focused && placeOf(focused);
  const number = place ? [...old.querySelectorAll(place)].indexOf(focused) : -1;
  if (String(getSelection()) && old.contains(getSelection().anchorNode)) return; // somebody is copying
  old.replaceWith(fresh);
  for (const [id, left] of scrolled) {
    const each = document.getElementById(id);
    if (each) each.scrollLeft = left;
  }
  for (const each of old.querySelectorAll("input[id], textarea[id]")) {
    // what somebody has typed is no value of the server
    const again = each.value !== each.defaultValue && fresh.querySelector(`#${CSS.escape(each.id)}`);
    if (again) again.value = each.value;
  }
  const alike = place ? [...fresh.querySelectorAll(place)] : [];
  const again = alike[number] ?? alike.at(-1);
  if (again) again.focus({ preventScroll: true });
}

// a selector: the id, the address, or the kind of element within the next one that has an id
function placeOf(focused) {
  if (focused.id) return `#${CSS.escape(focused.id)}`;
  const href = focused.getAttribute("href");
  if (href) return `[href="${CSS.escape(href)}"]`;
  const around = focused.closest("[id]");
  return `#${CSS.escape(around.id)} ${focused.localName}`;
}

// the time on the console's clock: ages must not depend on this machine's
export function serverNow() {
  return Date.now() - ahead;
}

export function ago(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h`;
  return `${Math.floor(s / 86400)} d`;
}

// times in the reader's own zone; without JavaScript they are in UTC
export function localTimes(within = document) {
  const sameDay = new Date().toDateString();
  for (const each of within.querySelectorAll("time[datetime]")) {
    const at = new Date(each.dateTime);
    if (Number.isNaN(at.getTime())) continue;
    each.title = at.toString();
    const time = at.toLocaleTimeString("en-GB");
    const day = `${at.getFullYear()}-${String(at.getMonth() + 1).padStart(2, "0")}-${String(at.getDate()).padStart(2, "0")}`;
    each.textContent = at.toDateString() === sameDay ? time : `${day} ${time}`;
  }
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-copy]");
  if (!button) return;
  const text = document.getElementById(button.dataset.copy).textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
    button.textContent = "Press Ctrl-C";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
});
