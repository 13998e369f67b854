"""Frozen groups that several jobs share: their items on each device."""

from collections.abc import Collection

from penstock.fleet._memory import DeviceMemory, Item


class FrozenGroups:
    """Items of frozen groups, by the content of the group and by the index of the device.

    Callers hold the engine's lock until a job refers to the item that they got. Otherwise `keep_only` might drop it.
    """

    def __init__(self) -> None:
        self._places: dict[str, dict[int, Item]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def find(self, key: str, device: int, memory: DeviceMemory) -> Item | None:
        """Return the item of a group with this content on a device; ``None`` if none is known that it could have."""
        places = self._places.get(key, {})
        if device in places:
            return places[device]
        settled = next((item for item in places.values() if item.is_settled), None)
        if settled is None:
            return None
        places[device] = settled.shared(memory.waterfall)
        return places[device]

    def put(self, key: str, device: int, item: Item) -> None:
        """Add the item of a group with this content."""
        self._places.setdefault(key, {})[device] = item

    def is_on(self, item: Item, device: int) -> bool:
        """Whether the device has the item, or another with the same bytes."""
        return any(device in places for places in self._places.values() if item in places.values())

    def moved(self, item: Item, device: int, memory: DeviceMemory) -> Item:
        """Return an item of the device with the same bytes."""
        for places in self._places.values():
            if item in places.values():
                if device not in places:
                    places[device] = item.shared(memory.waterfall)
                return places[device]
        return item.shared(memory.waterfall)

    def keep_only(self, used: Collection[Item | None]) -> None:
        """Give back groups of which no item is used any more, each on its own device."""
        for key, places in list(self._places.items()):
            if not any(item in used for item in places.values()):
                del self._places[key]
                for item in places.values():
                    item.is_stale = True
