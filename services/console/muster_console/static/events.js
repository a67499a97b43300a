// The live tail of events: the newest first; pausing keeps the page still, not the fleet.
import { connect, localTimes } from "./live.js";

const ROWS_MAX = 500;
const root = document.documentElement.dataset.root;
const list = document.getElementById("events");
const pause = document.getElementById("pause");
const note = document.getElementById("tail-note");
const empty = document.getElementById("no-events");

let paused = false;
let missed = 0;
let skipped = 0;
let dropped = 0;

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function row(event) {
  const item = element("li");
  const details = element("details");
  const summary = element("summary");
  const time = element("time", "muted");
  time.dateTime = event.time;
  summary.append(time, element("span", "", event.node), element("span", "id", event.type), element("span", "text", event.text));
  details.append(summary);
  details.addEventListener("toggle", () => expand(details, event), { once: true });
  item.append(details);
  localTimes(item);
  return item;
}

async function expand(details, event) {
  const body = element("pre", "", "reading...");
  body.tabIndex = 0; // long JSON is scrolled with keys, too
  details.append(body);
  try {
    const answer = await fetch(`${root}api/event?id=${encodeURIComponent(event.id)}`);
    body.textContent = await answer.text();
    if (answer.headers.get("x-cut")) {
      const whole = element("a", "", `show all of it (${answer.headers.get("x-cut")} bytes)`);
      whole.href = `${root}api/event?whole=1&id=${encodeURIComponent(event.id)}`;
      details.append(whole);
    }
  } catch {
    body.textContent = "the console does not answer";
  }
}

function receive(message) {
  count(message);
  if (paused) {
    missed += message.events.length;
    pause.textContent = `Resume (${missed} new)`;
    return;
  }
  list.prepend(...message.events.map(row).reverse());
  while (list.children.length > ROWS_MAX) list.lastElementChild.remove();
  empty.hidden = list.children.length > 0;
}

// what this page has not shown, since it was opened
function count(message) {
  skipped += message.skipped;
  dropped += message.dropped;
  const parts = [];
  if (skipped) parts.push(`${events(skipped)} skipped: more came than this page shows at once`);
  if (dropped) parts.push(`${events(dropped)} no longer known to the console, so some that match may be missing`);
  if (parts.length) note.textContent = parts.join("; ");
}

function events(number) {
  return number === 1 ? "1 event was" : `${number.toLocaleString("en")} events were`;
}

pause.hidden = false;
pause.addEventListener("click", () => {
  paused = !paused;
  pause.setAttribute("aria-pressed", String(paused));
  if (!paused && missed) location.reload();
  pause.textContent = paused ? "Resume" : "Pause";
});

for (const details of list.querySelectorAll("details")) {
  const link = details.querySelector("a");
  const show = () => { link.remove(); expand(details, { id: details.dataset.id }); };
  // it may have been opened before this script ran
  if (details.open) show();
  else details.addEventListener("toggle", show, { once: true });
}
localTimes();
const query = new URLSearchParams(location.search);
const { instance } = document.documentElement.dataset;
connect({ instance, events: 1, type: query.get("type") || "", node: query.get("node") || "", event: list.dataset.last }, { events: receive });
