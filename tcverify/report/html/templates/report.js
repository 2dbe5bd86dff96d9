"use strict";
// What the page does beyond what it says. Without this script everything essential is there to be read; see report.html.j2.
// Text is set as text, never as markup: names of nodes are what others wrote.
const $ = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value) made.setAttribute(name, value);
  made.append(...children);
  return made;
};
const source = document.getElementById("nodes");
const known = source ? JSON.parse(source.textContent) : { nodes: {}, values: [] };

// ---- commands that are copied
for (const holder of document.querySelectorAll(".copy")) {
  const command = holder.querySelector("pre");
  const button = $("button", { type: "button" }, "Copy");
  const select = () => {
    const range = document.createRange();
    range.selectNodeContents(command);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
  };
  button.addEventListener("click", async () => {
    let done = true;
    try {
      await navigator.clipboard.writeText(command.textContent);
    } catch {
      select();
      done = document.execCommand("copy");
    }
    button.textContent = done ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  button.setAttribute("aria-live", "polite");
  holder.append(button);
}

// ---- the values of a node: the same as values.html.j2
const tensor = (numbers, caption, differing, worst) => {
  const [shape, text, whole, sampled, sample, around] = numbers;
  const figure = $("figure", {}, $("figcaption", {}, caption));
  if (shape.length) figure.firstChild.append(" ", $("code", {}, `[${shape.join(", ")}]`));
  if (!whole) {
    figure.append($("p", { class: "summary" }, text || "no elements"));
    if (sampled) {
      const cells = sample.split(" ").map((t, i) => $("td", { class: i === around && "d w" }, t));
      const row = $("tr", {}, $("th", { scope: "row" }, sampled), ...cells);
      figure.append($("div", { class: "scroll" }, $("table", { class: "tensor" }, $("tbody", {}, row))));
    }
    return figure;
  }
  const elements = text.split(" "), width = shape.length ? shape[shape.length - 1] : 1;
  const body = $("tbody");
  for (let first = 0; first < elements.length; first += width) {
    const row = $("tr");
    if (shape.length > 1) {
      const index = [];
      for (let k = shape.length - 2, rest = first / width; k >= 0; rest = Math.floor(rest / shape[k]), k--) index.unshift(rest % shape[k]);
      row.append($("th", { scope: "row" }, `[${index.join(", ")}, :]`));
    }
    for (let i = first; i < first + width; i++) row.append($("td", { class: i === worst ? "d w" : differing.has(i) && "d" }, elements[i]));
    body.append(row);
  }
  figure.append($("div", { class: "scroll" }, $("table", { class: "tensor" }, body)));
  return figure;
};
const showValues = (record) => {
  const found = $("div", { class: "values" });
  for (const [ranks, part, before, after, differing, worst, verdict, wrong] of record.e) {
    const on = $("p", { class: "on" }, $("b", {}, `rank${/^\d+$/.test(ranks) ? "" : "s"} ${ranks}${part && `, element ${part}`}`));
    if (verdict) on.append(" ", $("span", { class: wrong && "bad" }, verdict));
    found.append(on);
    const marked = new Set(differing);
    if (verdict === "equal") found.append(tensor(after, "before and after", marked));
    else {
      if (before) found.append(tensor(before, `before: ${record.b}`, marked, worst));
      if (after) found.append(tensor(after, `after: ${record.a}`, marked, worst));
    }
  }
  if (record.m) found.append($("p", { class: "soft" }, `${record.m} not shown.`));
  return found;
};

// ---- drawings
const BOX = 52, GAP = 34, TOP = 34, MARGIN = 10, CHANNEL = 11, PANEL_GAP = 48;
const top_ = (slot) => TOP + slot * (BOX + GAP);
const bend = (x, y, toX, toY) => (x === toX ? `V${toY}` : `C${x} ${(y + toY) / 2} ${toX} ${(y + toY) / 2} ${toX} ${toY}`);

const goes = new Map(); // to the node of a box, by the box's id
for (const stage of document.querySelectorAll(".stage")) {
  const drawing = stage.querySelector(".drawing"), inspector = stage.querySelector(".inspector");
  const chosen = inspector.querySelector(".chosen"), start = inspector.querySelector(".start");
  const tools = stage.querySelector(".tools"), at = stage.querySelector(".at");
  const boxes = new Map(), readers = new Map(), operands = new Map(), edges = [];
  const panels = [...drawing.querySelectorAll(".panel")].map((element) => {
    const [right, channels] = element.dataset.right.split(" ").map(Number);
    return { element, right, channels, boxes: [], edges: [] };
  });
  for (const panel of panels) {
    for (const element of panel.element.querySelectorAll(".box")) {
      const [, x] = /\(([-\d.]+)/.exec(element.getAttribute("transform"));
      const width = +element.querySelector(".frame").getAttribute("width");
      const box = { element, x: +x, end: +x + width, layer: +element.dataset.l, away: element.classList.contains("away") };
      boxes.set(element.id, box);
      panel.boxes.push(box);
      readers.set(element.id, []);
      operands.set(element.id, []);
    }
    for (const element of panel.element.querySelectorAll(".edge")) {
      const [from, to, ...xs] = element.dataset.e.split(" ");
      operands.get(to)?.push(from);
      readers.get(from)?.push(to);
      const edge = { element, from, to, xs: xs.map(Number), hidden: false };
      edges.push(edge);
      panel.edges.push(edge);
    }
  }
  const folds = [];
  for (const element of drawing.querySelectorAll(".fold")) {
    const [number, first, last] = element.dataset.fold.split(" ").map(Number);
    (folds[number] ??= { first, last, open: false, marks: [] }).marks.push({ element, words: element.querySelector(".op").textContent });
  }
  const layers = 1 + Math.max(-1, ...[...boxes.values()].map((b) => b.layer));
  const foldAt = new Map();
  for (const fold of folds) for (let layer = fold.first; layer <= fold.last; layer++) foldAt.set(layer, fold);
  let slots = [];

  const arrange = () => {
    slots = [];
    for (let layer = 0, slot = -1; layer < layers; layer++) {
      const fold = foldAt.get(layer);
      if (fold?.open && layer === fold.first) slot++; // its handle
      if (!fold || fold.open || layer === fold.first) slot++;
      slots[layer] = slot;
    }
    for (const box of boxes.values()) {
      const fold = foldAt.get(box.layer);
      box.away = Boolean(fold) && !fold.open;
      box.element.classList.toggle("away", box.away);
      box.element.setAttribute("transform", `translate(${box.x} ${top_(slots[box.layer])})`);
    }
    const into = new Set();
    for (const edge of edges) {
      const a = boxes.get(edge.from), b = boxes.get(edge.to);
      const fold = b.away ? foldAt.get(b.layer) : null;
      const way = fold && `${edge.from} ${fold.first}`;
      edge.hidden = Boolean(fold) && (fold === (a.away && foldAt.get(a.layer)) || into.has(way));
      if (fold) into.add(way);
      edge.element.classList.toggle("away", edge.hidden);
    }
    let left = 0;
    for (const panel of panels) {
      // What is folded needs no room: the channels, at the right of all boxes, move up to what is in sight.
      const ends = panel.boxes.filter((b) => !b.away).map((b) => b.end);
      for (const edge of panel.edges) if (!edge.hidden) ends.push(...edge.xs.filter((x) => x <= panel.right));
      const moved = ends.length ? panel.right - ends.reduce((a, b) => Math.max(a, b)) : 0;
      panel.end = panel.right - moved;
      panel.element.setAttribute("transform", `translate(${left} 0)`);
      left += panel.end + MARGIN + (panel.channels ? CHANNEL * (panel.channels + 1) : 0) + PANEL_GAP;
      for (const edge of panel.edges) {
        if (edge.hidden) continue;
        const [begin, lane, end] = edge.xs, way = lane > panel.right ? lane - moved : lane;
        const from = slots[boxes.get(edge.from).layer], to = slots[boxes.get(edge.to).layer], y = top_(from) + BOX, bottom = top_(to);
        edge.element.setAttribute("d", to - from === 1
          ? `M${begin} ${y}${bend(begin, y, end, bottom)}`
          : `M${begin} ${y}${bend(begin, y, way, y + GAP)}V${bottom - GAP}${bend(way, bottom - GAP, end, bottom)}`);
      }
    }
    for (const fold of folds) {
      const y = top_(slots[fold.first] - (fold.open ? 1 : 0)) + (fold.open ? 15 : 0);
      fold.marks.forEach(({ element, words }, number) => {
        const [frame, op, note] = [".frame", ".op", ".note"].map((part) => element.querySelector(part)), width = panels[number].end - MARGIN;
        element.setAttribute("transform", `translate(${MARGIN} ${y})`);
        element.classList.toggle("open", fold.open);
        element.setAttribute("aria-expanded", String(fold.open));
        frame.setAttribute("width", width);
        frame.setAttribute("height", fold.open ? 22 : BOX);
        op.textContent = words.replace(/^… (.*) …$/, fold.open ? "▾ fold $1 away" : "▸ $1");
        op.setAttribute("x", width / 2);
        op.setAttribute("y", fold.open ? 15 : note ? 23 : 31);
        note?.setAttribute("x", width / 2);
      });
    }
    const last = slots.length ? slots[slots.length - 1] : 0, height = top_(last + 1) - GAP + 10;
    const width = left - PANEL_GAP;
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.style.width = `${Math.round(width)}px`;
    drawing.style.minWidth = `${Math.round(width * 0.72)}px`;
    const bands = drawing.querySelector(".bands"), band = bands.firstElementChild;
    if (band) {
      bands.replaceChildren(...Array.from({ length: last + 1 }, (_, i) => {
        const copy = band.cloneNode();
        copy.setAttribute("y", top_(i) - 8);
        copy.setAttribute("width", width);
        return copy;
      }));
    }
    const all = tools.querySelector("[data-do=folds]"), open = folds.every((f) => f.open);
    if (all) {
      all.textContent = open ? "Fold again" : "Open all folds";
      all.setAttribute("aria-pressed", String(open));
    }
  };

  // -- what is looked at: the kept node, or the one under the pointer
  let kept = null;
  const trace = (id) => {
    for (const lit of drawing.querySelectorAll(".lit, .twin")) lit.classList.remove("lit", "twin");
    drawing.classList.toggle("tracing", id !== null);
    if (id === null) return;
    boxes.get(id).element.classList.add("lit");
    for (const edge of edges) {
      if (edge.to !== id && edge.from !== id) continue;
      edge.element.classList.add("lit");
      boxes.get(edge.to === id ? edge.from : edge.to).element.classList.add("lit");
    }
    boxes.get(twin(id))?.element.classList.add("twin");
  };
  const twin = (id) => id[0] + (id[1] === "b" ? "a" : "b") + id.slice(2);
  const link = (id) => {
    const node = known.nodes[id], button = $("button", { type: "button", class: "node" }, node ? node.n : "…");
    button.addEventListener("click", () => go(id));
    return button;
  };
  const row = (term, ...what) => $("div", {}, $("dt", {}, term), $("dd", {}, ...what));
  const show = (id) => {
    const node = id === null ? null : known.nodes[id];
    chosen.hidden = !node;
    start.hidden = Boolean(node);
    inspector.classList.toggle("sheet", Boolean(node));
    if (!node) return;
    const close = $("button", { type: "button", class: "close", "aria-label": "back" }, "×");
    close.addEventListener("click", () => { clear(); });
    const heading = $("h3", {}, $("code", {}, node.n));
    if (node.f) heading.append(" ", $("span", { class: "tag flag" }, `◀ ${node.f}`));
    if (node.m) heading.append(" ", $("span", { class: "tag" }, node.m));
    const facts = $("dl", { class: "plain" });
    if (node.t) facts.append(row("returns", $("code", {}, node.t)));
    if (node.p) facts.append(row("placement", node.p));
    const told = node.r ? node : known.nodes[twin(id)] ?? {};
    if (told.r) {
      facts.append(row(told === node ? "it is" : "after the pass it is", told.r));
      if (told.w) facts.lastChild.lastChild.className = "bad";
    }
    const links = (ids) => [...new Set(ids)].slice(0, 12).map(link);
    if (operands.get(id)?.length) facts.append(row("reads", ...links(operands.get(id))));
    if (readers.get(id)?.length) facts.append(row("is read by", ...links(readers.get(id))));
    if (boxes.has(twin(id))) facts.append(row("in the other graph", link(twin(id))));
    chosen.replaceChildren(close, heading, $("p", { class: "call" }, $("code", {}, node.c)), facts);
    if (node.v !== undefined) chosen.append(showValues(known.values[node.v]));
    inspector.scrollTop = 0;
  };
  const look = (id) => { trace(id); show(id); };
  const clear = () => { kept = null; look(null); count(); };

  // -- one stop of the tab order; arrows go from box to box
  let current = null;
  const stops = () => [...boxes.values()].filter((b) => !b.away).map((b) => b.element).concat(folds.flatMap((f) => f.marks.map((m) => m.element)));
  const rove = (element) => {
    current?.setAttribute("tabindex", "-1");
    current = element;
    current.setAttribute("tabindex", "0");
  };
  const focus = (element) => {
    rove(element);
    element.focus({ preventScroll: true });
    reveal(element);
  };
  const canvas = drawing.parentElement;
  const reveal = (element) => {
    const seen = element.getBoundingClientRect(), frame = canvas.getBoundingClientRect();
    const sheet = inspector.getBoundingClientRect(), edge = 70;
    const bottom = getComputedStyle(inspector).position === "fixed" ? sheet.top : innerHeight;
    if (seen.top < edge || seen.bottom > bottom - edge / 2) scrollBy(0, (seen.top + seen.bottom - edge - bottom) / 2);
    if (seen.left < frame.left || seen.right > frame.right) canvas.scrollLeft += (seen.left + seen.right - frame.left - frame.right) / 2;
  };
  const open = (fold, wanted = !fold.open) => {
    fold.open = wanted;
    arrange();
  };
  const go = (id) => {
    const box = boxes.get(id);
    if (!box) return;
    const fold = foldAt.get(box.layer);
    if (fold && !fold.open) open(fold, true);
    kept = id;
    look(id);
    focus(box.element);
    count();
  };
  const middle = (element) => {
    const seen = element.getBoundingClientRect();
    return { x: (seen.left + seen.right) / 2, y: (seen.top + seen.bottom) / 2 };
  };
  const nearest = (from, elements, dx, dy) => {
    const a = middle(from);
    let best = null, least = Infinity;
    for (const element of elements) {
      if (element === from) continue;
      const b = middle(element), along = dx ? (b.x - a.x) * dx : (b.y - a.y) * dy, across = Math.abs(dx ? b.y - a.y : b.x - a.x);
      if (along <= 1) continue;
      const far = along + 4 * across;
      if (far < least) [best, least] = [element, far];
    }
    return best;
  };
  const step = (dx, dy) => {
    const all = stops(), box = boxes.get(current.id);
    if (box && dy) {
      const ids = (dy < 0 ? operands : readers).get(current.id), marks = folds.flatMap((f) => f.marks);
      const linked = ids.map((id) => {
        const other = boxes.get(id), fold = other.away && foldAt.get(other.layer);
        return fold ? marks.find((m) => fold.marks.includes(m) && m.element.parentNode === other.element.parentNode).element : other.element;
      });
      const found = nearest(current, linked, 0, dy);
      if (found) return found;
    }
    const here = middle(current);
    return nearest(current, dx ? all.filter((e) => Math.abs(middle(e).y - here.y) < 40) : all, dx, dy);
  };
  const land = (element) => {
    if (!element) return;
    if (boxes.has(element.id)) go(element.id);
    else { kept = null; look(null); focus(element); }
  };

  // -- changes and the first bad node
  const order = (a, b) => boxes.get(a).layer - boxes.get(b).layer || boxes.get(a).x - boxes.get(b).x;
  const changes = [...boxes.keys()].filter((id) => {
    const classes = boxes.get(id).element.classList;
    if (classes.contains("gap")) return false;
    return classes.contains("flagged") || ["removed", "inserted", "moved"].some((mark) => classes.contains(mark)) || (classes.contains("changed") && id[1] === "a");
  }).sort(order);
  const first = [...boxes.keys()].find((id) => id[1] === "a" && boxes.get(id).element.classList.contains("flagged"))
    ?? [...boxes.keys()].find((id) => boxes.get(id).element.classList.contains("flagged")) ?? changes[0] ?? boxes.keys().next().value;
  const count = () => {
    const number = changes.indexOf(kept);
    at.textContent = number < 0 ? `${changes.length} change${changes.length === 1 ? "" : "s"}` : `change ${number + 1} of ${changes.length}`;
  };
  const change = (by) => {
    if (!changes.length) return;
    let number = changes.indexOf(kept);
    if (number >= 0) number += by;
    else {
      const from = kept ?? (boxes.has(current.id) ? current.id : null);
      const after = from === null ? 0 : changes.findIndex((id) => order(id, from) >= (by > 0 ? 1 : 0));
      number = (after < 0 ? changes.length : after) + (by > 0 ? 0 : -1);
    }
    go(changes[(number + changes.length) % changes.length]);
  };
  const foldAll = () => {
    const wanted = !folds.every((f) => f.open);
    for (const fold of folds) fold.open = wanted;
    arrange();
    if (kept !== null && boxes.get(kept).away) clear();
    if (boxes.get(current.id)?.away) rove(boxes.get(first).element);
  };

  const search = tools.querySelector("input");
  const find = (again) => {
    const text = search.value.trim().toLowerCase();
    if (!text) { search.removeAttribute("aria-invalid"); return; }
    const ids = [...boxes.keys()].filter((id) => known.nodes[id]);
    const exact = ids.filter((id) => known.nodes[id].n.toLowerCase() === text);
    const found = (exact.length ? exact : ids.filter((id) => `${known.nodes[id].n} ${known.nodes[id].c}`.toLowerCase().includes(text))).sort(order);
    search.setAttribute("aria-invalid", String(!found.length));
    if (!found.length) return;
    const number = again ? (found.indexOf(kept) + 1) % found.length : 0, id = found[number];
    const box = boxes.get(id), fold = foldAt.get(box.layer);
    if (fold && !fold.open) open(fold, true);
    kept = id;
    rove(box.element);
    look(id);
    reveal(box.element);
    at.textContent = `${number + 1} of ${found.length} found`;
  };
  search.addEventListener("input", () => find(false));
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") find(true);
    if (event.key === "Escape" && kept !== null) focus(boxes.get(kept).element);
    event.stopPropagation();
  });

  for (const { element } of boxes.values()) {
    const id = element.id;
    element.setAttribute("role", "button");
    element.setAttribute("tabindex", "-1");
    element.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse" && kept === null) look(id); else if (event.pointerType === "mouse") trace(id); });
    element.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") look(kept); });
    element.addEventListener("click", (event) => {
      event.stopPropagation();
      if (kept === id) clear(); else go(id);
    });
  }
  for (const fold of folds) {
    for (const { element } of fold.marks) {
      element.setAttribute("role", "button");
      element.setAttribute("tabindex", "-1");
      element.addEventListener("click", (event) => { event.stopPropagation(); open(fold); focus(element); });
    }
  }
  drawing.addEventListener("click", clear);
  drawing.addEventListener("focusin", (event) => {
    const element = event.target.closest(".box, .fold");
    if (!element) return;
    rove(element);
    if (boxes.has(element.id)) { kept = element.id; look(kept); count(); }
  });
  tools.addEventListener("click", (event) => {
    const what = event.target.closest("button")?.dataset.do;
    if (what === "first") go(first);
    if (what === "next") change(1);
    if (what === "previous") change(-1);
    if (what === "folds") foldAll();
  });
  const moves = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] };
  stage.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const inside = drawing.contains(event.target);
    if (event.key === "Escape") {
      if (inspector.contains(event.target)) focus(current);
      else clear();
    } else if (inside && moves[event.key]) land(step(...moves[event.key]));
    else if (inside && (event.key === "Enter" || event.key === " ")) {
      const fold = folds.find((f) => f.marks.some((m) => m.element === current));
      if (fold) open(fold);
      else inspector.focus();
    } else if (inside && event.key === "n") change(1);
    else if (inside && event.key === "p") change(-1);
    else if (inside && event.key === "f") go(first);
    else if (inside && event.key === "/") search.focus();
    else return;
    event.preventDefault();
  });
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a.jump");
    if (!link || !boxes.has(link.hash.slice(1))) return;
    event.preventDefault();
    history.replaceState(null, "", link.hash);
    go(link.hash.slice(1));
  });
  for (const article of start.querySelectorAll("article[data-node]")) {
    const name = article.querySelector("h3 code, h4 code"), button = $("button", { type: "button", class: "node" }, name.textContent);
    button.addEventListener("click", () => go(article.dataset.node));
    name.replaceChildren(button);
  }

  for (const id of boxes.keys()) goes.set(id, () => go(id));
  tools.hidden = false;
  rove(boxes.get(first)?.element ?? stops()[0]);
  arrange();
  count();
  if (boxes.has(location.hash.slice(1))) go(location.hash.slice(1));
}

// ---- names of nodes elsewhere on the page lead to their boxes
const named = new Map(Object.entries(known.nodes).filter(([id]) => id[0] === "p").map(([id, node]) => [`${id[1]} ${node.n}`, id]));
for (const element of document.querySelectorAll("[data-go]")) {
  const id = named.get(element.dataset.go), go = goes.get(id);
  if (!go) continue;
  if (element instanceof SVGElement) {
    element.classList.add("leads");
    element.addEventListener("click", go);
    continue;
  }
  const button = $("button", { type: "button", class: "go", title: "show it in the graph" }, ...element.childNodes);
  button.addEventListener("click", go);
  element.replaceChildren(button);
}
document.documentElement.classList.add("ready");
