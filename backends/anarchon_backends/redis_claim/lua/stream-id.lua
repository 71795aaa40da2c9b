-- The claim of the strategy `stream-id`: an entry whose id is the slot. A stream takes no id that is
-- not above its last one: also when entries were trimmed or deleted, for the last id stays.

local TOO_SMALL = 'is equal or smaller than the target stream top item'

-- Whose token holds the slot from now on; nil: nobody's, as a newer slot has been claimed.
local function take(key, claim)
  local stream, id = key .. ':slots', text(claim.slot) .. '-0'
  local added = redis.pcall('XADD', stream, id, 'token', claim.token)
  if type(added) ~= 'table' then
    return claim.token
  end
  if not string.find(added.err, TOO_SMALL, 1, true) then
    read_failed(stream, added)
  end
  local entry = read(stream, 'XRANGE', stream, id, id)[1]
  return entry and entry[2][2]
end

local function tend()
end

-- Drops the entries of slots that are too old for anybody to claim.
local function trim(key)
  read(key .. ':slots', 'XTRIM', key .. ':slots', 'MINID', text(NOW - KEPT_MS))
end

-- Drops the stream with its last id, where every slot up to that is too old for anybody to claim.
local function forget(key)
  if read(key .. ':slots', 'XLEN', key .. ':slots') == 0 then
    redis.call('DEL', key .. ':slots')
  end
end
