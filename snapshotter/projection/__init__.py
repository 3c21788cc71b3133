"""The metadata image: an EROFS image of a merged tree."""
