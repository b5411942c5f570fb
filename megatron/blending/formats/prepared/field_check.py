"""pure. Checks the field map of a dataset.yaml against samples before the first one is used."""

from collections.abc import Sequence

from megatron.blending.arguments import nearest, shown
from megatron.blending.formats.decode import Decode
from megatron.blending.formats.prepared.field_map import FieldMap, Missing
from megatron.blending.formats.prepared.nv_meta import SampleType
from megatron.blending.formats.record import RecordSource

_NUM_PROBED = 64


def check_field_map(kind: SampleType, source: RecordSource, decode: Decode) -> None:
    """Raises ValueError if a field's source, a part or a key in JSON, exists in none of 64 evenly
    spread samples. It stops at the first samples that have all fields: usually one.

    A field that exists in fewer than one of 64 samples may be refused, too. Such a run would end
    anyway, by default after a hundred failed samples in a row.
    """
    field_map = FieldMap(kind.field_map, f"{kind.where}: field_map")
    suspects: dict[str, list[Missing]] = {name: [] for name in kind.field_map}
    num_read = 0
    for index in dict.fromkeys(
        at * (len(source) - 1) // (_NUM_PROBED - 1) for at in range(_NUM_PROBED)
    ):
        try:
            missing = field_map.missing(source[index], decode)
        except Exception:
            # A user's decoder may raise anything. It raises again when the sample is used.
            continue
        num_read += 1
        suspects = {
            name: [*faults, missing[name]] for name, faults in suspects.items() if name in missing
        }
        if not suspects:
            return
    if num_read:
        name, faults = next(iter(suspects.items()))
        way_out = (
            ". If some others do, name an alternative behind a comma"
            if len(source) > _NUM_PROBED
            else ""
        )
        raise ValueError(
            f"{kind.where}: field_map: {name}: none of {num_read} samples that were read has "
            f"{_missing_names(faults)}{way_out}"
        )


def _missing_names(faults: Sequence[Missing]) -> str:
    """Returns the missing name, a key rather than a part, and the most similar existing one."""
    key = next((fault for fault in faults if fault.within), faults[0])
    there = dict.fromkeys(
        name for fault in faults if fault.within == key.within for name in fault.there
    )
    if not key.within:
        return f"a part {shown(key.name)}; {nearest(key.name, there, 'parts')}"
    if key.held and not there:
        return f"a key {shown(key.name)} in {key.within}: that is no object, but of type {key.held}"
    return f"a key {shown(key.name)} in {key.within}; {nearest(key.name, there, 'keys')}"
