-- Workspaces that were deleted or expired long ago are erased by a worker, the oldest first.
CREATE INDEX workspaces_by_end ON workspaces ((coalesce(deleted_at, expires_at)))
    WHERE coalesce(deleted_at, expires_at) IS NOT NULL;
