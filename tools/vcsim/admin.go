package main

import (
	"encoding/json"
	"maps"
	"net"
	"net/http"
	"strconv"
	"time"
)

// serveAdmin answers, in plain HTTP:
//
//	GET    /counters            calls per method
//	DELETE /counters            back to zero
//	GET    /moves               by clone: how its disks were to be moved, as a whole and one by one
//	GET    /clones              how many clones were under way at once
//	POST   /faults              one rule, as JSON
//	DELETE /faults              no rules
//	POST   /delays              {"method": milliseconds} for answers
//	POST   /volumes?vm=&unit=   the machine's disk at this unit becomes a first class disk, as CSI volumes are
//	GET    /find?kind=&path=    references that govmomi's finder finds
//	POST   /sessions/drop       every session ends
//	POST   /sessions/limit?n=   no login beyond so many sessions; 0 for any number
//	POST   /accessible?vm=&is=  whether vCenter can read the machine's files
//	POST   /datastores?name=&freeGiB=[&maintenance=]  room and mode of a datastore
//	POST   /folders?path=       folders for machines, such as one/two
//	POST   /portgroups?name=&segment=  a port group of an NSX segment; names that start with NSX- may repeat
//	POST   /groups/clear?name=  all machines leave a VM group
//	POST   /restart?downMs=500  connections cut, sessions gone, away for a while
func (w *world) serveAdmin(address string, f *front) (string, error) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /counters", func(out http.ResponseWriter, _ *http.Request) {
		w.Lock()
		counts := maps.Clone(w.counts)
		w.Unlock()
		answer(out, counts, nil)
	})
	mux.HandleFunc("DELETE /counters", func(out http.ResponseWriter, _ *http.Request) {
		w.Lock()
		clear(w.counts)
		w.Unlock()
		answer(out, true, nil)
	})
	mux.HandleFunc("GET /moves", func(out http.ResponseWriter, _ *http.Request) {
		w.Lock()
		moves := maps.Clone(w.moves)
		w.Unlock()
		answer(out, moves, nil)
	})
	mux.HandleFunc("GET /clones", func(out http.ResponseWriter, _ *http.Request) {
		w.Lock()
		defer w.Unlock()
		answer(out, w.peak, nil)
	})
	mux.HandleFunc("POST /faults", func(out http.ResponseWriter, r *http.Request) {
		added := new(rule)
		err := json.NewDecoder(r.Body).Decode(added)
		if err == nil {
			w.Lock()
			w.rules = append(w.rules, added)
			w.Unlock()
		}
		answer(out, true, err)
	})
	mux.HandleFunc("DELETE /faults", func(out http.ResponseWriter, _ *http.Request) {
		w.Lock()
		w.rules = nil
		w.Unlock()
		w.service.ClearFaultRules()
		answer(out, true, nil)
	})
	mux.HandleFunc("POST /delays", func(out http.ResponseWriter, r *http.Request) {
		delays := map[string]int{}
		err := json.NewDecoder(r.Body).Decode(&delays)
		w.Lock()
		maps.Copy(w.delays, delays)
		w.Unlock()
		answer(out, true, err)
	})
	mux.HandleFunc("POST /volumes", func(out http.ResponseWriter, r *http.Request) {
		unit, err := strconv.Atoi(r.URL.Query().Get("unit"))
		if err == nil {
			err = w.makeVolume(r.URL.Query().Get("vm"), int32(unit))
		}
		answer(out, true, err)
	})
	mux.HandleFunc("GET /find", func(out http.ResponseWriter, r *http.Request) {
		found, err := w.find(r.Context(), r.URL.Query().Get("kind"), r.URL.Query().Get("path"))
		answer(out, found, err)
	})
	mux.HandleFunc("POST /sessions/drop", func(out http.ResponseWriter, r *http.Request) {
		dropped, err := w.dropSessions(r.Context())
		answer(out, map[string]int{"dropped": dropped}, err)
	})
	mux.HandleFunc("POST /sessions/limit", func(out http.ResponseWriter, r *http.Request) {
		limit, err := strconv.Atoi(r.URL.Query().Get("n"))
		w.Lock()
		w.maxSessions = limit
		w.Unlock()
		answer(out, true, err)
	})
	mux.HandleFunc("POST /accessible", func(out http.ResponseWriter, r *http.Request) {
		is, err := strconv.ParseBool(r.URL.Query().Get("is"))
		if err == nil {
			err = w.setAccessible(r.URL.Query().Get("vm"), is)
		}
		answer(out, true, err)
	})
	mux.HandleFunc("POST /datastores", func(out http.ResponseWriter, r *http.Request) {
		query := r.URL.Query()
		free, err := strconv.ParseInt(query.Get("freeGiB"), 10, 64)
		if err == nil {
			err = w.setDatastore(query.Get("name"), free, query.Get("maintenance"))
		}
		answer(out, true, err)
	})
	mux.HandleFunc("POST /folders", func(out http.ResponseWriter, r *http.Request) {
		answer(out, true, w.makeFolders(r.Context(), r.URL.Query().Get("path")))
	})
	mux.HandleFunc("POST /portgroups", func(out http.ResponseWriter, r *http.Request) {
		query := r.URL.Query()
		answer(out, true, w.makePortgroup(r.Context(), query.Get("name"), query.Get("segment")))
	})
	mux.HandleFunc("POST /groups/clear", func(out http.ResponseWriter, r *http.Request) {
		answer(out, true, w.clearGroup(r.URL.Query().Get("name")))
	})
	mux.HandleFunc("POST /restart", func(out http.ResponseWriter, r *http.Request) {
		down, _ := strconv.Atoi(r.URL.Query().Get("downMs"))
		answer(out, true, f.restart(time.Duration(down)*time.Millisecond, func() error {
			_, err := w.dropSessions(r.Context())
			return err
		}))
	})
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return "", err
	}
	go func() { _ = http.Serve(listener, mux) }()
	return "http://" + listener.Addr().String(), nil
}

func answer(out http.ResponseWriter, value any, err error) {
	if err != nil {
		http.Error(out, err.Error(), http.StatusInternalServerError)
		return
	}
	out.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(out).Encode(value)
}
