"""What can go wrong with the catalog, at a start and later."""

from kvtierd.tiers.errors import StartError


class CatalogError(StartError):
    """The catalog could not do what it was asked; nothing of it was done."""


class CatalogFull(CatalogError):
    """The file system has no room for the catalog to grow; asking again later may succeed."""


class CatalogDamaged(CatalogError):
    """The file is not a database of ours, or its pages or values contradict themselves."""


class CatalogFormatError(CatalogError):
    """The file was written in a format that this version does not read."""


class CatalogBusy(CatalogError):
    """The writer has fallen too far behind; asking again later may succeed."""
