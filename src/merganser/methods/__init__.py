"""Merging rules, one family per file. A family is imported when one of its rules is looked up (`methods.registry`)."""

from merganser.lazy import exports

#: The module of each family, and the names it registers.
FAMILIES = {
    "ace": ("ace",),
    "adapters": ("knots", "core_space"),
    "adarank": ("adarank",),
    "averages": ("linear", "wise_ft", "ema", "passthrough"),
    "esm": ("esm",),
    "extremes": ("magmax", "emr"),
    "informed": ("fisher", "regmean"),
    "isotropic": ("iso_c", "iso_cts"),
    "localize_stitch": ("localize_stitch",),
    "model_stock": ("model_stock",),
    "opcm": ("opcm",),
    "pairs": ("nearswap", "arcee_fusion"),
    "pcb": ("pcb",),
    "ram": ("ram", "ram_plus", "ramplus_tl"),
    "sce": ("sce",),
    "schedules": ("wsm",),
    "spectral": ("svc", "subspace_boosting", "star"),
    "spherical": ("slerp", "nuslerp", "multislerp", "karcher"),
    "tall": ("consensus_ta",),
    "task_vectors": (
        "task_arithmetic",
        "lines",
        "ties",
        "dare_linear",
        "dare_ties",
        "della",
        "della_linear",
        "breadcrumbs",
        "breadcrumbs_ties",
    ),
    "tsv": ("tsv",),
    "wudi": ("wudi",),
}

__getattr__, __dir__, __all__ = exports(__name__, {}, modules=tuple(FAMILIES))
