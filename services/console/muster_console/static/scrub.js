// The slider below a timeline: shows the state at the chosen time, and keeps it in the address.
import { localTimes } from "./live.js";

let wanted = "";
let isReading = false;

async function show() {
  if (isReading) return;
  isReading = true;
  try {
    while (wanted) {
      const at = wanted;
      wanted = "";
      const params = new URLSearchParams(location.search);
      params.set("at", at);
      history.replaceState(null, "", `?${params}`);
      params.set("part", "moment");
      const answer = await fetch(`?${params}`);
      if (!answer.ok) continue;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("moment");
      const old = document.getElementById("moment");
      if (!fresh || !old) continue;
      localTimes(fresh);
      old.replaceWith(fresh);
      if (!wanted && fresh.dataset.x) move(fresh.dataset.x);
    }
  } catch {
    // the banner already says that the console does not answer
  } finally {
    isReading = false;
  }
}

function move(x) {
  const cursor = document.getElementById("cursor");
  cursor.setAttribute("x1", x);
  cursor.setAttribute("x2", x);
  cursor.removeAttribute("visibility");
  cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function choose(input) {
  input.setAttribute("aria-valuetext", new Date(Number(input.value)).toLocaleString());
  move(4 + 992 * (input.value - input.min) / (input.max - input.min));
  wanted = input.value;
  show();
}

// the slider is drawn anew with its page: listeners are on the document
document.addEventListener("input", (event) => {
  if (event.target.id === "scrub") choose(event.target);
});
document.addEventListener("click", (event) => {
  const drawing = event.target.closest("svg.timeline");
  const input = document.getElementById("scrub");
  if (!drawing || !input) return;
  const place = drawing.getBoundingClientRect();
  const part = ((event.clientX - place.left) / place.width * 1000 - 4) / 992;
  input.value = Number(input.min) + Math.min(1, Math.max(0, part)) * (input.max - input.min);
  choose(input);
});

export function isHeld() {
  return document.querySelector("#scrub:active") !== null;
}
