// Node, alerts and plots: rendered by the console; fetched again when something changed.
import { connect, localTimes, refresh } from "./live.js";
import { isHeld } from "./scrub.js";

const page = document.body.dataset;
const { instance, revision, alerts } = document.documentElement.dataset;

async function renew() {
  if (isHeld()) return; // the next change or half minute comes
  await refresh("main");
}

document.body.dataset.scripts = "true"; // no button is needed
localTimes();
// what changed since the page was rendered comes first
connect({ instance, after: revision, alerts }, {
  fleet: (changes) => {
    const nodes = [...changes.names, ...changes.removed];
    if (page.page === "node" && nodes.includes(page.node)) renew();
    if (page.page === "plots") renew();
  },
  alerts: () => { if (page.page !== "plots") renew(); },
  restart: renew,
  visible: renew,
});
// ages and the end of the timeline move on without any change
setInterval(renew, 30000);
