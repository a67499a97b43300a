// The connection of every page to the console: hints that something changed, and how old it is.

const root = document.documentElement.dataset.root;
const live = document.getElementById("live");
const problem = document.getElementById("problem");
const caveats = document.getElementById("caveats");
const RETRY_S = 5;
const RETRY_S_MAX = 60;
const BUSY = [429, 503];
const AGAIN_MS = 500;

let heard = 0;
let ahead = 0; // milliseconds by which this machine's clock is ahead of the console's
let instance = "";

// Follows the console while the page is visible, because a browser has only six connections for all
// pages of one address. What has changed since `query`, or since the last message, comes first.
export function connect(query, listeners) {
  let source = null;
  let position = ""; // what the last message has brought this page to
  let timer = 0;
  let following = true;
  instance ||= query.instance || "";

  function open() {
    clearTimeout(timer);
    if (!following || source || document.hidden) return;
    const params = new URLSearchParams(query);
    if (position) params.set("position", position);
    source = new EventSource(`${root}api/changes?${params}`);
    listen("state", receiveState);
    for (const [name, listener] of Object.entries(listeners)) listen(name, listener);
    source.addEventListener("error", lost);
  }

  function listen(name, listener) {
    source.addEventListener(name, (message) => {
      heard = Date.now();
      position = message.lastEventId || position;
      listener(JSON.parse(message.data));
    });
  }

  function lost() {
    say("lost", "no connection to the console; trying again");
    document.body.classList.add("is-old");
    if (source.readyState !== EventSource.CLOSED) return; // the browser tries again
    close();
    timer = setTimeout(open, retryMs());
  }

  function close() {
    clearTimeout(timer);
    source?.close();
    source = null;
  }

  function changeVisibility() {
    if (document.hidden) {
      close();
      heard = 0;
      say("page", "not live while hidden");
    } else {
      open();
      listeners.visible?.();
    }
  }

  function end() {
    following = false;
    close();
    document.removeEventListener("visibilitychange", changeVisibility);
  }

  document.addEventListener("visibilitychange", changeVisibility);
  addEventListener("pagehide", end, { once: true });
  open();
  return { close: end };
}

function receiveState(state) {
  if (instance && instance !== state.instance) {
    location.reload(); // another console process answers: its revisions are others
    return;
  }
  instance = state.instance;
  ahead = heard - Date.parse(state.at);
  show(state);
}

// How long to wait before asking a busy console again: as long as it says, and up to twice as long,
// so that not all pages come at the same time.
export function retryMs(answer) {
  const told = Number(answer?.headers.get("retry-after"));
  return Math.min(told > 0 ? told : RETRY_S, RETRY_S_MAX) * 1000 * (1 + Math.random());
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
  let wait = AGAIN_MS;
  try {
    const answer = await fetch(address, { headers: { accept: "text/html" } });
    if (BUSY.includes(answer.status)) {
      again ??= [selector, address];
      wait = retryMs(answer);
    } else if (answer.ok || answer.status === 404) { // of a node that was removed
      renew(selector, address, new DOMParser().parseFromString(await answer.text(), "text/html"));
    }
  } catch {
    // the banner already says that the console does not answer
  }
  if (again) setTimeout(next, wait);
  else refreshing = false;
}

function next() {
  const newest = again;
  again = null;
  refreshing = false;
  refresh(...newest);
}

let held = null; // the refresh that waits for the end of a selection
function renew(selector, address, page) {
  if (page.title) document.title = page.title;
  const fresh = page.querySelector(selector);
  const old = document.querySelector(selector);
  if (!fresh || !old) return;
  if (isSelected(old)) {
    held = [selector, address];
    return;
  }
  localTimes(fresh);
  swap(old, fresh);
}

// somebody may be copying
function isSelected(part) {
  const selection = getSelection();
  return Boolean(String(selection)) && (part.contains(selection.anchorNode) || selection.containsNode(part, true));
}

document.addEventListener("selectionchange", () => {
  const part = held && document.querySelector(held[0]);
  if (!part || isSelected(part)) return;
  const wanted = held;
  held = null;
  refresh(...wanted);
});

function swap(old, fresh) {
  const open = new Set([...old.querySelectorAll("details[open][id]")].map((each) => each.id));
  for (const each of fresh.querySelectorAll("details[id]")) each.open = open.has(each.id);
  const scrolled = [...old.querySelectorAll(".scroll[id]")].map((each) => [each.id, each.scrollLeft]);
  const focused = old.contains(document.activeElement) ? document.activeElement : null;
  const place = focused && placeOf(focused);
  const number = place ? [...old.querySelectorAll(place)].indexOf(focused) : -1;
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
