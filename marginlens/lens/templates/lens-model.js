/* The state of the page: the loss, the points on the circle, and how both are written into a link. */
const model = (() => {
  const {abs, exp, max, min, PI, round} = Math,
    RAD = PI / 180;
  const data = JSON.parse(document.getElementById("lens-data").textContent);
  const ORDER = ["margin", "emphasis", "ratio", "attenuation"],
    VIEWS = ["weights", "split", "gradients"];
  const NEGATIVES = [84, 122, 156, -66, -104, -142];
  const RANGES = {
    tau: [0.01, 1],
    beta: [0, 1],
    copies: [1, 1000],
    m1: [0, PI],
    m2: [-1e6, 1e6],
    s: [0, 1e6],
    c: [1e-9, Infinity],
    alpha: [0, 1],
  };
  const WORDS = {scope: ["positive", "row"], kind: ["I", "II"]};
  const fresh = () => ({
    tau: 0.25,
    beta: 1,
    copies: 1,
    positive: 55,
    negatives: [...NEGATIVES],
    maps: "weights",
    run: -1,
    step: 0,
    on: {margin: false, emphasis: false, ratio: false, attenuation: false},
    margin: {m1: 0.4, m2: 0},
    emphasis: {s: 20, c: Infinity},
    ratio: {m1: 0.4, scope: "positive"},
    attenuation: {alpha: 1, kind: "I"},
  });
  let state = fresh();

  const factors = () => ORDER.filter(name => state.on[name]).map(name => ({name, ...state[name]}));
  const clamp = (x, [least, most]) => max(least, min(most, x));
  const turned = degrees => ((((degrees + 180) % 360) + 360) % 360) - 180;
  const angle = degrees => min(PI, abs(degrees) * RAD);
  const joint = () => (state.run < 0 ? null : data.runs[state.run].joints[state.step]);

  /* dL/dtheta of every point; of the plain loss if no factor is given. */
  const forces = list =>
    lens.forces(list, angle(state.positive), state.negatives.map(angle), state.tau, state.beta, state.copies);

  /* What the effect multiplies the positive's gradient and each negative's gradient by, at the row on the circle. */
  function weights(list) {
    const row = lens.rowOf(angle(state.positive), state.negatives.map(angle), state.tau, state.copies),
      found = lens.multipliers(list, row, state.beta);
    const endless = row.sin < 1e-9 && list.some(factor => factor.name === "margin" && factor.m1 > 0); // or sin(pi) is not 0
    return {row, positive: found.sign * (endless ? Infinity : exp(found.positive)), negative: exp(found.negative)};
  }

  function hash() {
    const known = {
      effect: lens.spell(factors()),
      tau: state.tau,
      beta: state.beta,
      copies: state.copies,
      positive: +state.positive.toFixed(1),
      negatives: state.negatives.map(x => +x.toFixed(1)).join(","),
      maps: state.maps,
    };
    if (data.runs.length) Object.assign(known, {run: state.run, step: state.step});
    return (
      "#" +
      Object.entries(known)
        .map(([key, value]) => `${key}=${encodeURIComponent(value).replace(/%2C/g, ",").replace(/%20/g, "+")}`)
        .join("&")
    );
  }

  /* Take a list of factors; the page has one switch for each kind. */
  function setEffect(list) {
    for (const name of ORDER) state.on[name] = false;
    for (const {name, ...given} of list) {
      if (name === "plain") continue;
      if (state.on[name]) throw new Error(`${name} is given twice, and the page has one switch for it`);
      for (const key in given) {
        const words = WORDS[key],
          good = words ? words.includes(given[key]) : clamp(given[key], RANGES[key]) === given[key];
        if (!good) throw new Error(`${name}'s ${key} cannot be ${given[key]}`);
      }
      state.on[name] = true;
      state[name] = given;
    }
  }

  /* Take an effect by its string form. Returns why it cannot be taken, or "". */
  function tryEffect(text, whose) {
    try {
      setEffect(lens.parse(text));
      return "";
    } catch (error) {
      setEffect([]);
      return `${whose} "${text.slice(0, 80)}": ${error.message}. The page shows the plain loss.`;
    }
  }

  /* Read a link. Values that are missing or wrong stay at their default. Returns a notice, or "". */
  function read(text) {
    state = Object.assign(fresh(), {run: state.run, step: state.step});
    const given = new URLSearchParams(text.replace(/^#/, ""));
    const number = (key, range) => {
      const value = Number.parseFloat(given.get(key));
      if (Number.isFinite(value)) state[key] = clamp(value, range);
    };
    const notice = given.has("effect") ? tryEffect(given.get("effect"), "The link asks for the effect") : "";
    for (const key of ["tau", "beta", "copies"]) number(key, RANGES[key]);
    state.copies = round(state.copies);
    number("positive", [-180, 180]);
    const list = (given.get("negatives") || "").split(",").map(Number);
    if (list.length === NEGATIVES.length && list.every(Number.isFinite)) state.negatives = list.map(turned);
    if (VIEWS.includes(given.get("maps"))) state.maps = given.get("maps");
    number("run", [-1, data.runs.length - 1]);
    number("step", [0, 1e9]);
    [state.run, state.step] = [round(state.run), round(state.step)];
    if (state.run >= 0) state.step = min(state.step, data.runs[state.run].steps.length - 1);
    return notice;
  }

  /* Take an example's loss and its positive; recorded rows stay. */
  function takePreset(index) {
    const {effect, tau, copies, maps, positive} = data.presets[index],
      {run, step} = state;
    state = {...fresh(), tau, copies, maps, positive, run, step};
    setEffect(lens.parse(effect));
  }

  /* Show the rows of a run, its last step first. */
  function takeRows(run) {
    state.run = run;
    state.step = run < 0 ? 0 : data.runs[run].steps.length - 1;
  }

  /* Take the loss of a run. Returns a notice, or "". */
  function takeLoss(run) {
    const {effect, tau, beta} = data.runs[run];
    Object.assign(state, {tau: clamp(tau, RANGES.tau), beta});
    return tryEffect(effect, "The run was trained with the effect");
  }

  /* A small descent step of every point along the circle. Returns the largest turn, in radians. */
  function descend(size) {
    const found = forces(factors());
    let most = 0;
    const moved = (degrees, gradient) => {
      const turn = clamp(-size * gradient * state.tau, [-0.04, 0.04]),
        side = degrees < 0 ? -1 : 1;
      const next = clamp(angle(degrees) + turn, [0, PI]);
      most = max(most, abs(next - angle(degrees)));
      return (side * next) / RAD;
    };
    state.positive = moved(state.positive, found.positive);
    state.negatives = state.negatives.map((degrees, j) => moved(degrees, found.negatives[j]));
    return most;
  }

  return {
    data,
    NEGATIVES,
    angle,
    clamp,
    descend,
    factors,
    forces,
    hash,
    joint,
    read,
    takeLoss,
    takePreset,
    takeRows,
    turned,
    weights,
    get state() {
      return state;
    },
  };
})();
