"""Encoders, heads and the EMA teacher: everything between an image and an embedding."""

from marginlens.nets.count import Facts, facts, feature_dim, flops, parameters
from marginlens.nets.ema import MOMENTA, constant_momentum, cosine_momentum, ema_update, teacher_of
from marginlens.nets.heads import predictor, projector
from marginlens.nets.resnet import ENCODERS, STEMS, ResNet, default_stem, encoder, load_backbone
from marginlens.nets.split_norm import count_once, embed

__all__ = [
    "ENCODERS",
    "MOMENTA",
    "STEMS",
    "Facts",
    "ResNet",
    "constant_momentum",
    "cosine_momentum",
    "count_once",
    "default_stem",
    "ema_update",
    "embed",
    "encoder",
    "facts",
    "feature_dim",
    "flops",
    "load_backbone",
    "parameters",
    "predictor",
    "projector",
    "teacher_of",
]
