"use strict";
for (const drawing of document.querySelectorAll(".drawing")) {
  const boxes = new Map([...drawing.querySelectorAll(".box")].map((box) => [box.id, box]));
  const edges = [...drawing.querySelectorAll(".edge")];
  let kept = null;
  const trace = (box) => {
    for (const lit of drawing.querySelectorAll(".lit, .twin")) lit.classList.remove("lit", "twin");
    drawing.classList.toggle("tracing", box !== null);
    if (box === null) return;
    box.classList.add("lit");
    for (const id of box.dataset.in.split(" ")) boxes.get(id)?.classList.add("lit");
    for (const edge of edges) if (edge.dataset.to === box.id) edge.classList.add("lit");
    boxes.get(box.dataset.twin)?.classList.add("twin");
  };
  for (const box of boxes.values()) {
    box.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") trace(box); });
    box.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") trace(kept); });
    box.addEventListener("focus", () => trace(box));
    box.addEventListener("blur", () => trace(kept));
    box.addEventListener("click", (event) => {
      kept = kept === box ? null : box;
      trace(kept);
      event.stopPropagation();
    });
  }
  const clear = () => { kept = null; trace(null); };
  document.addEventListener("click", clear);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") clear(); });
}
