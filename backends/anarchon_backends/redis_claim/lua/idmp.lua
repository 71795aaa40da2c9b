-- The claim of the strategy `idmp`: an entry with the slot as its idempotent id. For an id that is
-- known already the server answers as it did the first time, whoever asks: the token in the entry
-- tells who won.

-- The window is set once, in the step that makes the stream: setting another empties it, and slots
-- would be won twice.
local function make(stream)
  if redis.call('EXISTS', stream) == 0 then
    redis.call('XADD', stream, '0-1', 'window', text(WINDOW_S))
    local set = redis.pcall('XCFGSET', stream, 'IDMP-DURATION', text(WINDOW_S), 'IDMP-MAXSIZE',
      text(WINDOW_SLOTS))
    if set.err then -- a stream that stayed would have the server's own window, far too small
      redis.call('DEL', stream)
      error(set.err, 0)
    end
  end
end

-- Makes sure of the window when the job is registered: it is all that this strategy rests on.
local function tend(key)
  local stream = key .. ':ids'
  if redis.call('EXISTS', stream) == 0 then
    return
  end
  local about, found = read(stream, 'XINFO', 'STREAM', stream), {}
  for i = 1, #about, 2 do
    found[about[i]] = about[i + 1]
  end
  if found['idmp-duration'] ~= WINDOW_S or found['idmp-maxsize'] ~= WINDOW_SLOTS then
    broken(stream, 'somebody else set its window, to ' .. found['idmp-duration'] .. ' s and '
      .. found['idmp-maxsize'] .. ' ids')
  end
end

-- Whose token holds the slot from now on.
local function take(key, claim)
  local stream = key .. ':ids'
  make(stream)
  local added = redis.pcall('XADD', stream, 'IDMP', 'anarchon', text(claim.slot), '*',
    'token', claim.token)
  if type(added) == 'table' then
    read_failed(stream, added)
  end
  local entry = read(stream, 'XRANGE', stream, added, added)[1]
  if not entry then
    broken(stream, 'entry ' .. added .. ' is gone, which tells who won')
  end
  return entry[2][2]
end

-- Drops the entries whose ids the server has forgotten. Its own time tells, as it made the ids.
local function trim(key)
  local oldest = (redis.call('TIME')[1] - WINDOW_S) * 1000 - KEPT_OVER_WINDOW_MS
  read(key .. ':ids', 'XTRIM', key .. ':ids', 'MINID', text(oldest))
end

local function forget(key)
  if read(key .. ':ids', 'XLEN', key .. ':ids') == 0 then
    redis.call('DEL', key .. ':ids')
  end
end
