"""CIFAR-10's moments from the recipe, and a `View` for each operation alone."""

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
ALONE = {
    "nothing": {},
    "flip": {"flip": 1.0},
    "brightness": {"jitter_p": 1.0, "jitter": (0.9, 0.0, 0.0, 0.0)},
    "contrast": {"jitter_p": 1.0, "jitter": (0.0, 0.9, 0.0, 0.0)},
    "saturation": {"jitter_p": 1.0, "jitter": (0.0, 0.0, 0.9, 0.0)},
    "hue": {"jitter_p": 1.0, "jitter": (0.0, 0.0, 0.0, 0.5)},
    "grey": {"grey": 1.0},
    "blur": {"blur": 1.0},
    "a wide blur": {"blur": 1.0, "sigma": (20.0, 60.0)},
    "solarise": {"solarise": 1.0},
    "normalise": {"mean": MEAN, "std": STD},
}
