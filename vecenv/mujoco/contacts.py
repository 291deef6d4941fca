"""Models that list their possible contacts, so that MuJoCo need not search for them in each substep.

The search for pairs of bodies that are close to each other costs more than it saves if only a few pairs can touch at
all, as in a robot whose limbs pass through each other. The contacts and their order do not change, so simulations are
equal bit for bit.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator

import mujoco
import numpy as np

_NAMES = "contype", "conaffinity", "condim", "priority", "friction", "solref", "solimp", "solmix", "margin", "gap"
CONTACT_FIELDS = frozenset(f"geom_{name}" for name in _NAMES)
"""Fields of MjModel that have no effect on listed contacts, which have their own parameters."""


def with_listed_contacts(spec: mujoco.MjSpec) -> mujoco.MjModel:
    """Returns the model of a spec with its contacts listed. Changes the spec.

    The model must not use geom priorities. Listing is faster only if few pairs of geoms can touch.
    """
    with warnings.catch_warnings():
        # Both compilations warn about Gymnasium's half_cheetah.xml.
        warnings.filterwarnings("ignore", "compiler attribute 'settotalmass' is deprecated")
        model = spec.compile()
        geoms = {geom.id: geom for geom in spec.geoms}
        for i, geom in geoms.items():
            geom.name = geom.name or f"geom_{i}"
        for one, other in _pairs(model):
            _add(spec, model, geoms[one].name, geoms[other].name, one, other)
        for geom in geoms.values():
            geom.contype = geom.conaffinity = 0
        return spec.compile()


def _pairs(model: mujoco.MjModel) -> Iterator[tuple[int, int]]:
    """Yields the pairs of geoms that can touch, in the order in which MuJoCo checks them."""
    excluded = set(model.exclude_signature.tolist())
    for body, other in itertools.combinations(range(model.nbody), 2):
        welded, other_welded = model.body_weldid[body], model.body_weldid[other]
        parent, other_parent = (model.body_weldid[model.body_parentid[b]] for b in (welded, other_welded))
        is_parent = welded and other_welded and (welded == other_parent or other_welded == parent)
        if welded == other_welded or is_parent or (body << 16) + other in excluded:
            continue
        for pair in itertools.product(_geoms_of(model, body), _geoms_of(model, other)):
            types, affinities = model.geom_contype[list(pair)], model.geom_conaffinity[list(pair)]
            if types[0] & affinities[1] or types[1] & affinities[0]:
                # The types of the two geoms decide which comes first in a contact.
                yield pair if model.geom_type[pair[0]] <= model.geom_type[pair[1]] else pair[::-1]


def _geoms_of(model: mujoco.MjModel, body: int) -> range:
    return range(model.body_geomadr[body], model.body_geomadr[body] + model.body_geomnum[body])


def _add(spec: mujoco.MjSpec, model: mujoco.MjModel, name: str, other_name: str, one: int, other: int) -> None:
    """Lists one pair, with the parameters that MuJoCo would compute from its geoms."""
    both = [one, other]
    mix = model.geom_solmix[one] / model.geom_solmix[both].sum()
    solref = mix * model.geom_solref[one] + (1 - mix) * model.geom_solref[other]
    if (model.geom_solref[both, 0] <= 0).any():
        solref = model.geom_solref[both].min(axis=0)
    sliding, torsional, rolling = model.geom_friction[both].max(axis=0)
    spec.add_pair(
        geomname1=name,
        geomname2=other_name,
        condim=model.geom_condim[both].max(),
        friction=np.array([sliding, sliding, torsional, rolling, rolling]),
        solref=solref,
        solimp=mix * model.geom_solimp[one] + (1 - mix) * model.geom_solimp[other],
        margin=model.geom_margin[both].sum(),
        gap=model.geom_gap[both].sum(),
    )
