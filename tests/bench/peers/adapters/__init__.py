"""One program for each store that is compared, run by the Python that has the store's packages."""
