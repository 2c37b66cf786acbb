/* The circle: points to drag, the arrows of their gradients, the sentence below, and the table of numbers. */
const circle = (() => {
  const {abs, log, PI, round, sign} = Math,
    RAD = PI / 180,
    $ = id => document.getElementById(id);
  const NS = "http://www.w3.org/2000/svg";
  function node(name, attributes, parent) {
    const made = document.createElementNS(NS, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    return parent.appendChild(made);
  }
  const set = (id, attributes) => {
    for (const key in attributes) $(id).setAttribute(key, attributes[key]);
  };

  /* A point to drag; -1 is the positive. `moved` is called after each move. */
  function handle(index, moved) {
    const plus = index < 0,
      r = plus ? 14 : 10.5;
    const group = node(
      "g",
      {
        class: `handle ${plus ? "plus" : "minus"}`,
        tabindex: 0,
        role: "slider",
        "data-point": index,
        "aria-label": plus ? "positive" : `negative ${index + 1}`,
        "aria-valuemin": -180,
        "aria-valuemax": 180,
      },
      $("points"),
    );
    node("circle", {class: "point-hit", r: 24}, group);
    node("circle", {class: "focus", r: r + 5}, group);
    node("circle", {class: "body", r}, group);
    node("path", {class: "sign", d: plus ? "M-6 0H6M0 -6V6" : "M-4.5 0H4.5"}, group);
    const arrows = ["ghost", "ghost tip", "force", "force-tip"].map(kind => node("path", {class: kind}, $("arrows")));
    const now = () => (plus ? model.state.positive : model.state.negatives[index]);
    const place = degrees => {
      if (plus) model.state.positive = degrees;
      else model.state.negatives[index] = degrees;
      moved();
    };
    const follow = event => {
      const point = new DOMPoint(event.clientX, event.clientY).matrixTransform($("circle").getScreenCTM().inverse());
      place(Math.atan2(point.x, -point.y) / RAD);
    };
    // or the browser scrolls and cancels the drag: inside an SVG it ignores touch-action
    group.addEventListener("touchstart", event => event.preventDefault(), {passive: false});
    group.addEventListener("pointerdown", event => {
      if (event.button) return;
      event.preventDefault();
      group.setPointerCapture(event.pointerId);
      group.classList.add("held");
      group.focus({preventScroll: true});
    });
    group.addEventListener("pointermove", event => group.hasPointerCapture(event.pointerId) && follow(event));
    for (const end of ["pointerup", "pointercancel"]) group.addEventListener(end, () => group.classList.remove("held"));
    group.addEventListener("keydown", event => {
      const steps = {ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10};
      const {key} = event;
      if (!(key in steps) && key !== "Home" && key !== "End") return;
      event.preventDefault();
      place(
        key === "Home" ? 0 : key === "End" ? 180 : model.turned(round(now()) + steps[key] * (event.shiftKey ? 10 : 1)),
      );
    });
    return {group, arrows};
  }
  let handles = [];
  /* Make the points. The positive comes last, so that it lies on top. */
  function make(moved) {
    const negatives = model.state.negatives.map((_, index) => handle(index, moved));
    handles = [handle(-1, moved), ...negatives];
  }

  /* The arrows of a point: the plain gradient, thin, and the gradient with the effect, coloured by its weight. */
  function point({group, arrows}, degrees, plain, found, weight, text) {
    const radians = degrees * RAD,
      towards = degrees < 0 ? 1 : -1;
    group.setAttribute(
      "transform",
      `translate(${draw
        .at(radians, 150)
        .map(x => x.toFixed(2))
        .join(" ")})`,
    );
    group.setAttribute("aria-valuenow", round(degrees));
    group.setAttribute("aria-valuetext", text);
    const pull = (gradient, r, width) => draw.arrow(radians, towards * sign(gradient) * draw.reach(gradient), r, width);
    const thin = pull(plain, 171, 4),
      thick = pull(found, 184, 8);
    [thin.line, thin.tip, thick.line, thick.tip].forEach((d, i) => arrows[i].setAttribute("d", d));
    const colour = found * plain < 0 ? "var(--bad)" : draw.ink(log(abs(weight)));
    arrows[2].style.stroke = arrows[3].style.fill = colour;
  }

  function points(list, theta, effect, plain, weights) {
    const {state} = model;
    const side = state.positive < 0 ? -1 : 1,
      {m1} = state.on.margin ? state.margin : {m1: 0};
    const border = lens.repelledFrom(list),
      away = effect.positive < 0;
    set("spoke", {d: `M0 0L${draw.at(side * theta, 150).join(" ")}`});
    set("wedge", {d: theta > 0.01 ? `M0 0L0 -44${draw.arc(0, side * theta, 44, "L")}Z` : ""});
    set("theta", {x: -side * 40, y: 5});
    $("theta").textContent = `θ = ${round(theta / RAD)}°`;
    set("band", {d: border < PI ? draw.arc(border, 2 * PI - border, 150) : ""});
    $("beyond").style.display = border < PI ? "" : "none";
    set("extra", {d: m1 > 0.01 ? draw.arc(side * theta, side * (theta + m1), 126) : ""});
    $("seen").style.display = m1 > 0.01 ? "" : "none";
    const [sx, sy] = draw.at(side * (theta + m1), 126);
    set("seen", {transform: `translate(${sx} ${sy})`});
    const inward = sx > 0 ? "end" : "start";
    $("seen").lastElementChild.setAttribute("style", `text-anchor:${inward}`);
    $("seen").lastElementChild.setAttribute("x", sx > 0 ? -15 : 15);
    $("seen").lastElementChild.setAttribute("y", 4);
    $("repelled").style.display = away ? "" : "none";
    const said = (degrees, times, word) =>
      `${round(abs(degrees))} degrees from the anchor, weight ${draw.short(times)}${word}`;
    point(
      handles[0],
      state.positive,
      plain.positive,
      effect.positive,
      weights.positive,
      said(state.positive, weights.positive, away ? ", repelled" : ""),
    );
    state.negatives.forEach((degrees, j) =>
      point(
        handles[j + 1],
        degrees,
        plain.negatives[j],
        effect.negatives[j],
        weights.negative,
        said(degrees, weights.negative, ""),
      ),
    );
  }

  /* Say in a sentence what the effect does to this row. */
  function say(theta, effect, {positive, negative}) {
    const by = x => `by <b>${draw.short(x)}</b>`;
    const even = x => abs(x - 1) < 5e-4;
    const where =
      `The positive is <b>${round(theta / RAD)}°</b> from its anchor; the plain loss gives it probability ` +
      `<b>${draw.short(effect.q)}</b>. `;
    const away = effect.positive < 0 ? `<b class="bad">θ + m1 is beyond 180°, so it is repelled.</b> ` : "";
    const pushes =
      model.state.beta === 0 ? ". With beta = 0, negatives feel nothing" : ` and each push ${by(negative)}`;
    const same = even(positive) && even(negative) && model.state.beta > 0;
    $("now").innerHTML =
      where +
      away +
      (same
        ? "Pull and pushes are those of the plain loss."
        : Number.isFinite(positive)
          ? `The effect multiplies its pull ${by(positive)}${pushes}.`
          : `Here the margin turns it, and the plain loss does not. Each push is multiplied ${by(negative)}.`);
  }

  function numbers(effect, plain, {positive, negative}) {
    const {state} = model;
    const line = (name, degrees, q, g, w, found) =>
      `<tr><th scope="row">${name}</th><td class="n">${round(abs(degrees))}°</td>` +
      [q, g, w, found].map(x => `<td class="n">${draw.short(x)}</td>`).join("") +
      "</tr>";
    $("numbers").tBodies[0].innerHTML =
      line("positive", state.positive, effect.q, plain.positive, positive, effect.positive) +
      state.negatives
        .map((degrees, j) =>
          line(
            `negative ${j + 1}`,
            degrees,
            (1 - effect.q) * effect.shares[j],
            plain.negatives[j],
            negative,
            effect.negatives[j],
          ),
        )
        .join("");
  }

  function render(list, effect, plain, weights) {
    const theta = model.angle(model.state.positive);
    points(list, theta, effect, plain, weights);
    say(theta, effect, weights);
    numbers(effect, plain, weights);
  }

  return {make, render};
})();
