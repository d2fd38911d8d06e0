"""Licences of merged models: the terms of the merge, and conflicts between them.

A table of what the licences' own texts say about derived works, by the names the hub uses. It finds what to look at;
it is not legal advice.
"""

from __future__ import annotations

from collections.abc import Iterable

#: Licences that derived works must keep -> the licences that they accept instead.
_SHARE_ALIKE = {
    "gpl-2.0": {"gpl-2.0"},
    "gpl-3.0": {"gpl-3.0", "agpl-3.0"},
    "agpl-3.0": {"agpl-3.0", "gpl-3.0"},
    "cc-by-sa-3.0": {"cc-by-sa-3.0", "cc-by-sa-4.0"},
    "cc-by-sa-4.0": {"cc-by-sa-4.0", "gpl-3.0"},
    "cc-by-nc-sa-3.0": {"cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0"},
    "cc-by-nc-sa-4.0": {"cc-by-nc-sa-4.0"},
}
#: Licences whose terms apply to derived works, in addition to other terms.
_OWN_TERMS = ("llama", "gemma", "openrail", "bigscience", "creativeml", "deepseek", "qwen", "tongyi", "falcon", "apple")
_FREE = ("apache-2.0", "mit", "bsd", "isc", "cc0", "cc-by-3.0", "cc-by-4.0", "unlicense", "wtfpl", "zlib", "cdla-perm")


def find_conflicts(licences: Iterable[str]) -> list[str]:
    """Return the conflicts between licences, one sentence each.

    Args:
        licences: Licences by the hub's names.

    Example:
        >>> find_conflicts(["mit", "apache-2.0"])
        []
    """
    known = sorted(set(licences))
    found = [f"{name} does not allow derived works to be shared" for name in known if _is_without_derivatives(name)]
    for name in known:
        for other in known:
            if name not in _SHARE_ALIKE or other in _SHARE_ALIKE[name] or _is_free(other):
                continue
            if other in _SHARE_ALIKE and (name in _SHARE_ALIKE[other] or other < name):
                continue  # compatible in the other direction, or already reported
            found.append(f"{name} asks for its own licence on derived works, which {other} does not allow")
    return found


def describe_terms(licences: Iterable[str]) -> list[str]:
    """Return the terms of a merge of models under these licences, besides attribution."""
    known = sorted(set(licences))
    restricted = [name for name in known if "-nc" in name or "noncommercial" in name or "non-commercial" in name]
    own = [name for name in known if name.startswith(_OWN_TERMS)]
    unknown = [name for name in known if not (_is_free(name) or name in _SHARE_ALIKE or name in restricted + own)]
    return [
        *(f"{name}: no commercial use" for name in restricted),
        *(f"{name}: derived works must be under the same licence" for name in known if name in _SHARE_ALIKE),
        *(f"{name}: its own terms and names go with derived works; read them" for name in own),
        *(f"{name}: unknown licence; read its terms" for name in unknown if not _is_without_derivatives(name)),
    ]


def _is_free(name: str) -> bool:
    return name.startswith(_FREE)


def _is_without_derivatives(name: str) -> bool:
    return name.startswith("cc-by-") and "-nd" in name
