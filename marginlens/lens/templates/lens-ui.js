/* Controls, and the loop: one state, drawn anew after each change, and kept in the link. */
(() => {
  const {min, max, PI, round} = Math,
    RAD = PI / 180,
    {data} = model;
  const $ = id => document.getElementById(id),
    all = words => [...document.querySelectorAll(words)];
  const OF_RUN = -2; // in place of a preset
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  let stale = true,
    moving = 0,
    going = 0,
    waiting = 0,
    preset = -1,
    kept = null;

  function keep() {
    $("link").href = model.hash();
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      try {
        history.replaceState(null, "", model.hash());
      } catch {
        /* a frame without an address of its own */
      }
    }, 200);
  }

  function notice(text) {
    $("notice").textContent = text;
    $("notice").hidden = !text;
  }

  const holder = key => (key.includes(".") ? [model.state[key.split(".")[0]], key.split(".")[1]] : [model.state, key]);
  const TO = {
    linear: x => x,
    log: x => Math.log10(x),
    whole: x => Math.log10(x),
    curve: x => (x > 10 ? 1.02 : Math.log10(x)),
  };
  const FROM = {
    linear: x => +x.toFixed(4),
    log: x => +(10 ** x).toPrecision(2),
    whole: x => round(10 ** x),
    curve: x => (x > 1.001 ? Infinity : +(10 ** x).toPrecision(2)),
  };
  const shown = (key, value) =>
    key.endsWith("m1")
      ? `${value.toFixed(2)} rad, ${round(value / RAD)}°`
      : key === "copies"
        ? `× ${value}`
        : draw.short(value);

  function drawControls() {
    for (const input of all("input[data-scale]")) {
      const [of, name] = holder(input.dataset.key),
        value = of[name];
      input.value = TO[input.dataset.scale](value);
      const text = shown(input.dataset.key, value);
      input.parentNode.querySelector("output").textContent = text;
      input.setAttribute("aria-valuetext", text === "∞" ? "infinite: no curvature" : text);
    }
    for (const input of all("input[type=checkbox]")) {
      const [of, name] = holder(input.dataset.key);
      input.checked = of[name];
      input.closest("fieldset").classList.toggle("on", of[name]);
    }
    for (const input of all("input[type=radio]")) {
      const [of, name] = holder(input.dataset.key);
      input.checked = of[name] === input.value;
    }
    if ($("run")) $("run").value = model.state.run;
    all("[data-preset]").forEach((button, i) => button.setAttribute("aria-pressed", i === preset));
    $("says").textContent =
      preset >= 0
        ? data.presets[preset].says
        : preset === OF_RUN
          ? `This is the loss of ${data.runs[0].name}: its effect, tau and beta. The dots below are its rows.`
          : "Your own setting. Drag the points, or pick an example above.";
    const beta = model.state.beta === 1 ? "" : `, beta=${model.state.beta}`;
    $("code").textContent =
      `marginlens.info_nce(q, k, tau=${model.state.tau}${beta}, effect="${lens.spell(model.factors())}")`;
  }

  function render() {
    const list = model.factors(),
      effect = model.forces(list),
      plain = model.forces([]),
      weights = model.weights(list);
    circle.render(list, effect, plain, weights);
    if (stale) {
      drawControls();
      charts.summary(list);
    }
    charts.render(list, effect, plain, weights, stale);
    stale = false;
  }

  let asked = 0;
  /* Draw before the next frame. Only a change of the parameters makes the maps anew. */
  function change(parameters) {
    stale ||= parameters;
    asked ||= requestAnimationFrame(() => {
      asked = 0;
      render();
    });
    keep();
  }

  function choose(index) {
    stop();
    const from = model.state.positive;
    model.takePreset(index);
    preset = index;
    kept = null;
    notice("");
    glide(from, model.state.positive);
    change(true);
  }

  /* Turn the positive to its new place in a third of a second; at once, if motion is unwelcome. */
  function glide(from, to) {
    model.state.positive = to;
    if (still.matches || from === to) return;
    const begin = performance.now(),
      mine = ++moving;
    const step = now => {
      if (mine !== moving) return;
      const share = min(1, max(0, now - begin) / 350),
        eased = share * share * (3 - 2 * share);
      model.state.positive = from + (to - from) * eased;
      change(false);
      if (share < 1) requestAnimationFrame(step);
      else moving = 0;
    };
    requestAnimationFrame(step);
  }

  function stop() {
    if (moving && moving === going) $("go").textContent = "Let go";
    moving = going = 0;
    $("go").setAttribute("aria-pressed", "false");
  }

  function go() {
    if (going) return stop();
    stop();
    kept ||= {positive: model.state.positive, negatives: [...model.state.negatives]};
    if (still.matches) {
      for (let i = 0; i < 20; i++) model.descend(0.03);
      return change(false);
    }
    const mine = (moving = going = Date.now());
    $("go").textContent = "Stop";
    $("go").setAttribute("aria-pressed", "true");
    let frames = 0;
    const step = () => {
      if (mine !== going) return undefined;
      const most = model.descend(0.03);
      change(false);
      return most > 2e-5 && ++frames < 900 ? requestAnimationFrame(step) : stop();
    };
    return requestAnimationFrame(step);
  }

  function back() {
    stop();
    const {positive} = preset >= 0 ? data.presets[preset] : model.state;
    Object.assign(model.state, kept || {positive, negatives: [...model.NEGATIVES]});
    kept = null;
    change(false);
  }

  all("[data-preset]").forEach(button => button.addEventListener("click", () => choose(Number(button.dataset.preset))));
  $("go").addEventListener("click", go);
  $("back").addEventListener("click", back);
  if (still.matches) $("go").textContent = "Take 20 steps";
  const entered = ({target}) => {
    const {key, scale} = target.dataset;
    if (key) {
      const [of, name] = holder(key);
      of[name] = scale ? FROM[scale](target.valueAsNumber) : target.type === "checkbox" ? target.checked : target.value;
      if (key !== "maps") preset = -1;
    } else if (target.id === "step") model.state.step = target.valueAsNumber;
    else if (target.id === "run") model.takeRows(Number(target.value));
    else return;
    change(true);
  };
  for (const kind of ["input", "change"]) document.addEventListener(kind, entered);
  addEventListener("hashchange", ({newURL}) => {
    const {hash} = new URL(newURL); // by now, the timer may have put the old state into the address again
    clearTimeout(waiting);
    stop();
    if (hash === model.hash()) return;
    preset = -1;
    kept = null;
    notice(model.read(hash));
    change(true);
  });
  charts.dark.addEventListener("change", () => change(true));

  circle.make(() => {
    stop();
    change(false);
  });
  if (data.runs.length) model.takeRows(0);
  if (location.hash.length > 1) notice(model.read(location.hash));
  else if (data.runs.length) {
    preset = OF_RUN;
    notice(model.takeLoss(0));
  } else model.takePreset((preset = data.start));
  render();
  keep();
})();
