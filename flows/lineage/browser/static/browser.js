// Comfort that the pages do without: live figures, keys, and buttons that copy a command.
"use strict";

// A page that shows something running is fetched again every two seconds, and its live parts are put in place of the
// old ones. What has the focus keeps it.
const PAUSE = 2000;

async function refresh() {
  if (document.hidden) return schedule();
  try {
    const answer = await fetch(location.href, { cache: "no-store" });
    if (answer.ok) replaceLiveParts(new DOMParser().parseFromString(await answer.text(), "text/html"));
  } catch {
    // The server is away for a moment; the next try may find it.
  }
  schedule();
}

function replaceLiveParts(page) {
  for (const old of document.querySelectorAll("[data-live]")) {
    const fresh = page.getElementById(old.id);
    if (!fresh) old.removeAttribute("data-live");
    else if (fresh.innerHTML !== old.innerHTML) {
      const places = [...old.querySelectorAll("a, summary, button")];
      const focused = places.indexOf(document.activeElement);
      const open = [...old.querySelectorAll("details")].map((details) => details.open);
      old.replaceChildren(...fresh.childNodes);
      old.querySelectorAll("details").forEach((details, index) => { details.open = open[index] ?? details.open; });
      if (focused >= 0) old.querySelectorAll("a, summary, button")[focused]?.focus({ preventScroll: true });
      addCopyButtons(old);
    }
  }
  const said = page.body.dataset.running;
  document.body.dataset.running = said ?? "";
  document.title = page.title;
}

function schedule() {
  if (document.body.dataset.running) setTimeout(refresh, PAUSE);
}

// "/" goes to the search; in a graph the arrow keys go to the nearest box in that direction.
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest("input, select, textarea");
  if (event.key === "/" && !typing) {
    event.preventDefault();
    document.getElementById("search").focus();
  }
  const box = event.target.closest(".graph a");
  const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (box && way) {
    const next = nearest(box, way);
    if (next) {
      event.preventDefault();
      next.focus();
    }
  }
});

function nearest(box, [x, y]) {
  const middle = (element) => {
    const place = element.getBoundingClientRect();
    return [place.left + place.width / 2, place.top + place.height / 2];
  };
  const [fromX, fromY] = middle(box);
  let best = null;
  let least = Infinity;
  for (const other of box.closest("svg").querySelectorAll("a")) {
    const [toX, toY] = middle(other);
    const along = (toX - fromX) * x + (toY - fromY) * y;
    const aside = Math.abs((toX - fromX) * y) + Math.abs((toY - fromY) * x);
    if (along > 1 && along + 2 * aside < least) {
      best = other;
      least = along + 2 * aside;
    }
  }
  return best;
}

function addCopyButtons(part) {
  if (!navigator.clipboard) return;
  for (const command of part.querySelectorAll(".command")) {
    if (command.querySelector("button")) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.setAttribute("aria-label", `Copy: ${command.querySelector("code").textContent}`);
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(command.querySelector("code").textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    command.append(button);
  }
}

addCopyButtons(document);
schedule();
