// The fleet: every node is a cell; only what changed is drawn again.
import { ago, connect, localTimes, refresh, retryMs, serverNow } from "./live.js";

const root = document.documentElement.dataset.root;
const LEVELS = ["critical", "warning", "unknown", "notice", "ok"];
const GLYPHS = ["C", "W", "?", "N", "·"];
const TILES_MAX = 60;
const MEDIUM_MAX = 600;
const NONE = "no group known";

const grid = document.getElementById("grid");
const inspector = document.getElementById("inspector");
const search = document.getElementById("search");
const by = document.getElementById("by");

const nodes = new Map(); // name -> node
const groups = new Map(); // name -> group
let revision = 0;
let filter = { levels: new Set(), words: [], by: "" };
let size = "";
let current = null; // the cell that Tab reaches

// ---- data

function* decoded(data) {
  for (let i = 0; i < data.names.length; i += 1) {
    yield {
      name: data.names[i],
      level: data.levels.charCodeAt(i) - 48,
      verdict: data.texts[data.verdict[i]],
      plugin: data.texts[data.plugin[i]],
      pool: data.texts[data.pool[i]],
      zone: data.texts[data.zone[i]],
      resources: data.kinds[data.kind[i]],
      since: data.since[i],
      alerts: data.alerts[i],
      silenced: data.silenced[i],
      pods: data.pods[i] || [],
      element: null,
      group: null,
    };
  }
}

function haystack(node) {
  const resources = node.resources.map((each) => each[0]).join(" ");
  const pods = node.pods.join(" ");
  return `${node.name} ${node.verdict} ${node.pool} ${node.zone} ${resources} ${pods}`.toLowerCase();
}

function isShown(node) {
  if (filter.levels.size && !filter.levels.has(LEVELS[node.level])) return false;
  if (!filter.words.length) return true;
  const text = haystack(node);
  return filter.words.every((word) => text.includes(word));
}

function groupNames(node) {
  if (filter.by === "pool") return node.pool || NONE;
  if (filter.by === "zone") return node.zone || NONE;
  if (filter.by === "resource") return node.resources.map((each) => each[0]).join(", ") || "no resource";
  return "";
}

// what the node's status lists may not be had while a plugin that serves it does not work
function usage([name, usable, total, isConfirmed]) {
  return `${name} ${usable}/${total} ${isConfirmed ? "usable" : "listed, unconfirmed"}`;
}

// a node in trouble whose plugin is healthy and has no alert, for example with silenced ones
function label(node) {
  const isWell = node.verdict === "HEALTHY" && LEVELS[node.level] !== "ok";
  return isWell || !node.verdict ? LEVELS[node.level].toUpperCase() : node.verdict;
}

function usedBy(node) {
  return node.pods.length > 1 ? `${node.pods[0]} and others` : node.pods[0];
}

function described(node) {
  const parts = [node.name, `${LEVELS[node.level]}${node.verdict ? ` ${node.verdict}` : ""}`];
  if (node.alerts) parts.push(`${node.alerts} alert${node.alerts > 1 ? "s" : ""}`);
  if (node.silenced) parts.push(`${node.silenced} silenced`);
  if (node.pods.length) parts.push(`used by ${usedBy(node)}`);
  return parts.join(", ");
}

// ---- drawing

function fill(node) {
  const cell = node.element;
  cell.className = `cell ${LEVELS[node.level]}${node.silenced ? " has-silence" : ""}`;
  cell.setAttribute("aria-label", described(node));
  cell.hidden = !isShown(node);
  if (size !== "tiles") {
    cell.textContent = GLYPHS[node.level];
    return;
  }
  const head = element("span", "tile-head");
  head.append(element("b", "", node.name));
  head.append(element("span", `badge ${LEVELS[node.level]}`, label(node)));
  const rows = node.resources.map(([name, usable, total, isConfirmed]) => {
    const row = element("span", "tile-row");
    row.append(element("span", "", name), element("span", "", `${usable}/${total} ${isConfirmed ? "usable" : "listed"}`));
    return row;
  });
  if (node.alerts) {
    const row = element("span", "tile-row");
    const silenced = node.silenced ? ` (${node.silenced} silenced)` : "";
    row.append(element("span", "", `${node.alerts} alert${node.alerts > 1 ? "s" : ""}${silenced}`));
    rows.push(row);
  }
  if (node.pods.length) {
    const row = element("span", "tile-row");
    row.append(element("span", "", `used by ${usedBy(node)}`));
    rows.push(row);
  }
  cell.replaceChildren(head, ...rows);
}

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

const template = element("a", "cell");
template.tabIndex = -1;

function cellOf(node) {
  const cell = template.cloneNode(false);
  cell.href = `${root}node/${encodeURIComponent(node.name)}`;
  cell.dataset.node = node.name;
  node.element = cell;
  fill(node);
  return cell;
}

function newGroup(name) {
  const section = element("section", "group");
  const title = element("h3");
  const counts = element("span", "muted");
  if (name) title.append(element("span", "", name));
  title.append(counts);
  const cells = element("div", "cells");
  section.append(title, cells);
  return { name, section, cells, counts, nodes: [] };
}

function summarize(group) {
  const per = [0, 0, 0, 0, 0];
  const resources = new Map();
  let shown = 0;
  for (const node of group.nodes) {
    if (node.element.hidden) continue;
    shown += 1;
    per[node.level] += 1;
    for (const [name, usable, total, isConfirmed] of node.resources) {
      const sum = resources.get(name) || [0, 0, 0];
      if (isConfirmed) sum[0] += usable;
      else sum[2] += usable;
      sum[1] += total;
      resources.set(name, sum);
    }
  }
  const parts = [`${shown.toLocaleString("en")} node${shown === 1 ? "" : "s"}`];
  per.forEach((count, level) => { if (count && level !== 4) parts.push(`${count} ${LEVELS[level]}`); });
  for (const [name, [usable, total, unsure]] of [...resources].sort().slice(0, 4)) {
    const rest = unsure ? `, ${unsure.toLocaleString("en")} unconfirmed` : "";
    parts.push(`${name} ${usable.toLocaleString("en")}/${total.toLocaleString("en")} usable${rest}`);
  }
  group.counts.textContent = parts.join(" · ");
  group.section.hidden = shown === 0;
}

const collator = new Intl.Collator("en", { numeric: true });
const inOrder = (a, b) => collator.compare(a.name, b.name);

function draw() {
  const count = nodes.size;
  const focused = document.activeElement?.closest("#grid .cell")?.dataset.node;
  size = count <= TILES_MAX ? "tiles" : count <= MEDIUM_MAX ? "medium" : "small";
  grid.className = size;
  groups.clear();
  for (const node of [...nodes.values()].sort(inOrder)) {
    const name = groupNames(node);
    let group = groups.get(name);
    if (!group) groups.set(name, group = newGroup(name));
    node.group = group;
    group.nodes.push(node);
    group.cells.append(cellOf(node));
  }
  const ordered = [...groups.values()].sort(inOrder);
  ordered.forEach(summarize);
  grid.replaceChildren(...ordered.map((group) => group.section));
  makeReachable(current && nodes.has(current) ? nodes.get(current).element : null);
  // the cell with the focus is another element now, or its node is gone
  if (focused) grid.querySelector('.cell[tabindex="0"]')?.focus({ preventScroll: true });
  empty();
}

function empty() {
  const shown = [...groups.values()].some((group) => !group.section.hidden);
  const note = document.getElementById("nothing");
  note.hidden = shown;
  note.textContent = nodes.size === 0
    ? "Health knows of no node yet. A node appears with the first heartbeat of its plugin."
    : "No node matches these filters.";
}

function applyFilter() {
  for (const node of nodes.values()) {
    const hidden = !isShown(node);
    if (node.element.hidden !== hidden) node.element.hidden = hidden;
  }
  for (const group of groups.values()) summarize(group);
  if (!current || !nodes.has(current) || nodes.get(current).element.hidden) makeReachable(null);
  empty();
}

function countLevels() {
  const per = [0, 0, 0, 0, 0];
  for (const node of nodes.values()) per[node.level] += 1;
  per.forEach((count, level) => {
    const button = document.querySelector(`.level[data-level="${LEVELS[level]}"]`);
    button.dataset.count = String(count);
    button.querySelector("b").textContent = count.toLocaleString("en");
  });
  document.getElementById("total").textContent = `${nodes.size.toLocaleString("en")} node${nodes.size === 1 ? "" : "s"}`;
  const bad = per[0] ? `${per[0]} critical` : per[1] ? `${per[1]} warning` : "";
  document.title = bad ? `${bad} · muster` : "Fleet · muster";
}

function change(data) {
  if (data.revision <= revision) return;
  const started = performance.now();
  revision = data.revision;
  const touched = new Set();
  let redraw = false;
  for (const fresh of decoded(data)) {
    const old = nodes.get(fresh.name);
    nodes.set(fresh.name, fresh);
    if (!old || groupNames(fresh) !== old.group.name) {
      redraw = true;
      continue;
    }
    fresh.element = old.element;
    fresh.group = old.group;
    old.group.nodes[old.group.nodes.indexOf(old)] = fresh;
    touched.add(old.group);
    if (redraw) continue;
    fill(fresh);
    if (old.level !== fresh.level && data.names.length <= 200) blink(fresh.element);
    if (current === fresh.name) fresh.element.tabIndex = 0;
  }
  for (const name of data.removed) {
    redraw = nodes.delete(name) || redraw;
  }
  if (redraw) draw();
  else touched.forEach(summarize);
  countLevels();
  empty();
  performance.measure("fleet-update", { start: started, detail: data.names.length });
}

function blink(cell) {
  cell.classList.add("changed");
  setTimeout(() => cell.classList.remove("changed"), 1800);
}

// ---- keyboard and pointer

function makeReachable(cell) {
  const before = grid.querySelector('.cell[tabindex="0"]');
  if (before) before.tabIndex = -1;
  const target = cell && !cell.hidden ? cell : grid.querySelector(".cell:not([hidden])");
  if (!target) return;
  target.tabIndex = 0;
  current = target.dataset.node;
}

function inspect(cell) {
  const node = cell && nodes.get(cell.dataset.node);
  if (!node) return;
  const parts = [described(node)];
  if (node.since) parts.push(`for ${ago(serverNow() / 1000 - node.since)}`);
  parts.push(...node.resources.map(usage));
  if (node.pool) parts.push(`pool ${node.pool}`);
  if (node.zone) parts.push(`zone ${node.zone}`);
  const text = parts.join(" · ");
  inspector.textContent = text;
  cell.title = text;
}

function moveTo(cell) {
  if (!cell) return;
  makeReachable(cell);
  cell.focus();
}

function neighbour(cell, key) {
  const cells = [...grid.querySelectorAll(".cell:not([hidden])")];
  const at = cells.indexOf(cell);
  if (key === "ArrowRight") return cells[at + 1];
  if (key === "ArrowLeft") return cells[at - 1];
  if (key === "Home") return cells[0];
  if (key === "End") return cells.at(-1);
  const here = cell.getBoundingClientRect();
  const step = key === "ArrowDown" ? 1 : -1;
  let best = null;
  let row = null;
  for (let i = at + step; i >= 0 && i < cells.length; i += step) {
    const place = cells[i].getBoundingClientRect();
    if (Math.abs(place.top - here.top) < 2) continue;
    if (row === null) row = place.top;
    if (Math.abs(place.top - row) > 2) break;
    if (best === null || Math.abs(place.left - here.left) < best[1]) best = [cells[i], Math.abs(place.left - here.left)];
  }
  return best && best[0];
}

grid.addEventListener("keydown", (event) => {
  const cell = event.target.closest(".cell");
  if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
  if (!["ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) return;
  event.preventDefault();
  moveTo(neighbour(cell, event.key));
});
grid.addEventListener("focusin", (event) => {
  const cell = event.target.closest(".cell");
  if (cell) { makeReachable(cell); inspect(cell); }
});
grid.addEventListener("mouseover", (event) => inspect(event.target.closest(".cell")));

addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.matches("input, select, textarea")) return;
  event.preventDefault();
  search.focus();
});

// ---- filters, which are in the address

function readAddress() {
  const params = new URLSearchParams(location.search);
  const levels = (params.get("level") || "").split(",").filter((each) => LEVELS.includes(each));
  const words = (params.get("q") || "").toLowerCase().split(/\s+/).filter(Boolean);
  filter = { levels: new Set(levels), words, by: params.get("by") || by.dataset.default };
  search.value = params.get("q") || "";
  by.value = [...by.options].some((each) => each.value === filter.by) ? filter.by : "none";
  for (const button of document.querySelectorAll(".level")) {
    button.setAttribute("aria-pressed", String(filter.levels.has(button.dataset.level)));
  }
}

function address(changes) {
  const params = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) {
    if (value) params.set(name, value);
    else params.delete(name);
  }
  const text = params.toString().replaceAll("%2C", ",");
  return text ? `?${text}` : location.pathname;
}

function go(changes, { replace = false } = {}) {
  const grouping = filter.by;
  history[replace ? "replaceState" : "pushState"](null, "", address(changes));
  readAddress();
  if (grouping === filter.by) applyFilter();
  else draw();
  renewSide();
}

document.getElementById("levels").addEventListener("click", (event) => {
  const button = event.target.closest(".level");
  if (!button || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const levels = new Set(filter.levels);
  if (!levels.delete(button.dataset.level)) levels.add(button.dataset.level);
  go({ level: LEVELS.filter((each) => levels.has(each)).join(",") });
});
let typing = 0;
search.addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(() => go({ q: search.value.trim() }, { replace: true }), 120);
});
by.addEventListener("change", () => go({ by: by.value }));
document.getElementById("filters").addEventListener("submit", (event) => {
  event.preventDefault();
  clearTimeout(typing);
  go({ q: search.value.trim() }, { replace: true });
});
addEventListener("popstate", () => {
  readAddress();
  draw();
  renewSide();
});

// ---- the list of problems beside the cells

let wanted = 0;
function renewSide() {
  clearTimeout(wanted);
  wanted = setTimeout(async () => {
    const params = new URLSearchParams(location.search);
    params.set("part", "side");
    await refresh("#side", `?${params}`);
  }, 150);
}

// ---- start

let source;
async function start() {
  source?.close();
  readAddress();
  localTimes();
  let data, answer;
  try {
    answer = await fetch(`${root}api/fleet`);
    if (!answer.ok) throw new Error(answer.statusText);
    data = await answer.json();
  } catch {
    setTimeout(start, retryMs(answer));
    return;
  }
  nodes.clear();
  for (const node of decoded(data)) nodes.set(node.name, node);
  revision = data.revision;
  draw();
  countLevels();
  performance.mark("fleet-interactive");
  document.body.dataset.ready = "true";
  source = connect({ after: data.revision, alerts: document.documentElement.dataset.alerts, instance: data.instance }, {
    fleet: (changes) => { change(changes); renewSide(); },
    alerts: renewSide,
    restart: start,
    visible: renewSide,
  });
}

start();
// a hidden page does not follow the changes, but its title is still read
setInterval(() => {
  if (document.hidden) refresh("#side");
  else renewSide();
}, 60000);
